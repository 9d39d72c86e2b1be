#include "arguments/policies.h"
#include "cuda/index/policy_args.h"

namespace dynemb::cuda {

PolicyArgs policy_args(const Call& call, const IndexArgs& index, const Tensor& policy,
                       const Tensor& clock, const Tensor& sketch,
                       const std::vector<int64_t>& feature_tables,
                       const std::vector<int64_t>& feature_policies) {
  const PolicyTensors given = policy_tensors(call, index.table_count, policy, clock, sketch,
                                             feature_tables.size(), feature_policies);
  return {given.rows, given.clock, nullptr};
}

}  // namespace dynemb::cuda
