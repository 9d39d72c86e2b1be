// Arguments of ops that send ids to shards, and of those that join them, checked.
#pragma once

#include <vector>

#include "arguments/tensors.h"
#include "core/features/feature_bags.h"

namespace dynemb {

// Raises unless `part` is one of `parts`.
void check_part(const char* op, int64_t parts, int64_t part);
// Raises unless `parts` can divide `slots`.
void check_slots(const char* op, int64_t parts, int64_t slots);

// Ids by group, such as a table's, as pointers into memory of their device.
struct GroupedIds {
  const int64_t* ids;
  int64_t count;
  const int64_t* offsets;  // [groups + 1]
  int64_t groups;
};
// Values of offsets are not read.
GroupedIds grouped_tensors(const CallContext& call, const Tensor& ids, const Tensor& offsets);

// ids_concat: the features of a call, ids of each, and offsets of those that `ragged` names. `bags`
// is that of each feature.
std::vector<FeatureBags> feature_bags(const CallContext& call, const std::vector<Tensor>& ids,
                                      const std::vector<Tensor>& offsets,
                                      const std::vector<int64_t>& ragged, int64_t bags);

}  // namespace dynemb
