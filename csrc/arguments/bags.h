// Checks of the arguments of ids_concat, for all devices.
#pragma once

#include <vector>

#include "arguments/tensors.h"
#include "core/features/feature_bags.h"

namespace dynemb {

// The features of a call: ids of each, and offsets of those that `ragged` names. `bags` is that of
// each feature.
std::vector<FeatureBags> feature_bags(const char* op, const std::vector<Tensor>& ids,
                                      const std::vector<Tensor>& offsets,
                                      const std::vector<int64_t>& ragged, int64_t bags);

}  // namespace dynemb
