// advance_step_: the end of a training step.
#include "core/policy/step_clock.h"

#include <torch/csrc/stable/library.h>

#include <optional>

#include "cpu/index/view.h"

namespace dynemb::cpu {
namespace {

void advance_step_(Tensor buckets, Tensor tables, Tensor row_clock, Tensor clock,
                   std::optional<int64_t> now) {
  const char* op = "advance_step_";
  check_tensor(op, "buckets", buckets, ScalarType::Long);
  check_size(op, "buckets", buckets, 1, kBucketWords);
  check_tensor(op, "tables", tables, ScalarType::Long);
  check_tensor(op, "row_clock", row_clock, ScalarType::Long);
  check_tensor(op, "clock", clock, ScalarType::Long);
  check_clocks(op, tables, row_clock, clock);
  constexpr int64_t kMostSteps = int64_t{1} << 62;
  const int64_t step = static_cast<const int64_t*>(clock.data_ptr())[kClockStep];
  STD_TORCH_CHECK(step >= 0 && step <= kMostSteps, "dynemb::", op, ": clock[0] is ", step,
                  ", expected a step from 0 to ", kMostSteps + 0);
  advance_clocks(static_cast<int64_t*>(clock.data_ptr()),
                 static_cast<int64_t*>(row_clock.data_ptr()) + row_clock.numel() - kRowClockExtra,
                 now.has_value() ? &*now : nullptr);
}

}  // namespace
}  // namespace dynemb::cpu

STABLE_TORCH_LIBRARY_IMPL(dynemb, CPU, m) {
  m.impl("advance_step_", TORCH_BOX(&dynemb::cpu::advance_step_));
}
