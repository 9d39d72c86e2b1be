// Host side of life-cycle policies: checked tensors as kernel arguments.
#pragma once

#include <vector>

#include "cuda/index/args.h"
#include "cuda/index/policies.cuh"

namespace dynemb::cuda {

// The values of `policy` lie on the device and are trusted. Set `of_feature` to feature_policies
// there.
PolicyArgs policy_args(const Call& call, const IndexArgs& index, const Tensor& policy,
                       const Tensor& clock, const Tensor& sketch,
                       const std::vector<int64_t>& feature_tables,
                       const std::vector<int64_t>& feature_policies);

}  // namespace dynemb::cuda
