// end_step_: the end of a training step.
#include "core/policy/step_clock.h"

#include <torch/csrc/stable/library.h>

#include <optional>

#include "arguments/clocks.h"
#include "core/policy/decisions.h"

namespace dynemb::cpu {
namespace {

void end_step_(Tensor buckets, Tensor tables, Tensor row_clock, std::optional<Tensor> clock,
               std::optional<int64_t> now) {
  const char* op = "end_step_";
  const ClockTensors clocks = clock_tensors(op, buckets, tables, row_clock, clock, now);
  if (clocks.clock == nullptr) return;
  check_step(op, clocks.clock[kClockStep]);
  advance_clocks(clocks.clock, clocks.extra, now.has_value() ? &*now : nullptr);
}

}  // namespace
}  // namespace dynemb::cpu

STABLE_TORCH_LIBRARY_IMPL(dynemb, CPU, m) {
  m.impl("end_step_", TORCH_BOX(&dynemb::cpu::end_step_));
}
