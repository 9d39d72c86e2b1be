#include "arguments/policies.h"

#include "core/policy/decisions.h"

namespace dynemb {

PolicyTensors policy_tensors(const CallContext& call, int64_t table_count, const Tensor& policy,
                             const Tensor& clock, const Tensor& sketch, size_t features,
                             const std::vector<int64_t>& feature_policies) {
  check_tensor(call, "clock", clock, ScalarType::Long);
  check_length(call.op, "clock", clock, kClockHead + table_count);
  check_tensor(call, "policy", policy, ScalarType::Long);
  check_size(call.op, "policy", policy, 1, kPolicyColumns);
  check_tensor(call, "sketch", sketch, ScalarType::Int);
  DYNEMB_CHECK(sketch.dim() == 1, "dynemb::", call.op, ": sketch has ", sketch.dim(),
               " dimensions, expected 1");
  const int64_t count = policy.size(0);
  DYNEMB_CHECK(count == 0 || count >= table_count, "dynemb::", call.op, ": policy has ", count,
               " rows, expected none or at least one per table, ", table_count);
  const size_t expected = count == 0 ? 0 : features;
  DYNEMB_CHECK(feature_policies.size() == expected, "dynemb::", call.op, ": feature_policies has ",
               feature_policies.size(), " elements, expected ", expected);
  for (size_t f = 0; f < feature_policies.size(); ++f) {
    DYNEMB_CHECK(feature_policies[f] >= 0 && feature_policies[f] < count, "dynemb::", call.op,
                 ": feature_policies[", f, "] is ", feature_policies[f], ", expected 0 to ",
                 count - 1);
  }
  return {count == 0 ? nullptr : static_cast<const int64_t*>(policy.data_ptr()), count,
          static_cast<const int64_t*>(clock.data_ptr()), sketch.numel()};
}

}  // namespace dynemb
