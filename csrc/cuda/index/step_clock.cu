// end_step_: the end of a training step.
#include <optional>

#include "arguments/clocks.h"
#include "core/policy/step_clock.h"
#include "cuda/index/args.h"
#include "cuda/memory/table_memory.h"

namespace dynemb::cuda {
namespace {

// One thread: three words.
__global__ void advance_step(int64_t* clock, int64_t* extra, bool has_now, int64_t now) {
  advance_clocks(clock, extra, has_now ? &now : nullptr);
}

// Counts the step if there is a clock. Raises errors that kernels have reported, updates the
// reported counts, and prepares a group for the next replay of a captured step.
void end_step_(Tensor buckets, Tensor tables, Tensor row_clock, std::optional<Tensor> clock,
               std::optional<int64_t> now) {
  const Call call("end_step_", "buckets", buckets);
  const ClockTensors clocks = clock_tensors(call, buckets, tables, row_clock, clock, now);
  check_step_is_not_captured(call);
  const InOrder in_order(call, stream_order(buckets));
  if (clocks.clock != nullptr) {
    call.launch(advance_step, 1, 1, clocks.clock, clocks.extra, now.has_value(), now.value_or(0));
  }
  end_group_step(call, buckets, tables, row_clock);
}

}  // namespace
}  // namespace dynemb::cuda

DYNEMB_IMPLEMENT_OPS(m) { m.impl("end_step_", TORCH_BOX(&dynemb::cuda::end_step_)); }
