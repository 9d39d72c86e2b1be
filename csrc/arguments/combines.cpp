#include "arguments/combines.h"

#include "core/policy/combine.h"
#include "core/policy/decisions.h"

namespace dynemb {

CombineArgs combine_args(const CallContext& call, int64_t table_count, const Tensor& clock,
                         const std::vector<int64_t>& combines,
                         const std::vector<int64_t>& half_lives, size_t features) {
  check_tensor(call, "clock", clock, ScalarType::Long);
  check_length(call.op, "clock", clock, kClockHead + table_count);
  check_entries(call.op, "combines", combines.size(), features);
  check_entries(call.op, "half_lives", half_lives.size(), features);
  CombineArgs result{static_cast<const int64_t*>(clock.data_ptr()), false};
  for (size_t f = 0; f < features; ++f) {
    DYNEMB_CHECK(combines[f] >= kCombineNone && combines[f] < kCombines, "dynemb::", call.op,
                 ": combines[", f, "] is ", combines[f], ", expected -1 to ", kCombines - 1);
    const bool decays = combines[f] == kCombineDecayedSum;
    DYNEMB_CHECK((half_lives[f] != 0) == decays, "dynemb::", call.op, ": half_lives[", f, "] is ",
                 half_lives[f], ", and combines[", f, "] is ", combines[f],
                 ": expected a half-life for decayed sums, else 0");
    result.any_last = result.any_last || combines[f] == kCombineLast;
  }
  return result;
}

}  // namespace dynemb
