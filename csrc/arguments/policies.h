// Checked arguments: life-cycle policies of a call, as pointers into memory of their device.
#pragma once

#include <cstdint>
#include <vector>

#include "arguments/tensors.h"

namespace dynemb {

struct PolicyTensors {
  const int64_t* rows;  // [count, kPolicyColumns]; nullptr: no table has a policy
  int64_t count;
  const int64_t* clock;
  int64_t cells;  // of the sketch
};
// Does not read values of the tensors. Each of `features` has a policy.
PolicyTensors policy_tensors(const CallContext& call, int64_t table_count, const Tensor& policy,
                             const Tensor& clock, const Tensor& sketch, size_t features,
                             const std::vector<int64_t>& feature_policies);

}  // namespace dynemb
