// Checked arguments: how a call combines custom scores, by feature.
#pragma once

#include <cstdint>
#include <vector>

#include "arguments/tensors.h"

namespace dynemb {

struct CombineArgs {
  const int64_t* clock;
  bool any_last;  // whether a feature has kCombineLast
};
// Does not read values of the tensors.
CombineArgs combine_args(const CallContext& call, int64_t table_count, const Tensor& clock,
                         const std::vector<int64_t>& combines,
                         const std::vector<int64_t>& half_lives, size_t features);

}  // namespace dynemb
