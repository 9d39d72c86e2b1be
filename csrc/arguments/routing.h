// Checked arguments of ops that send ids to shards, and of ops that join them.
#pragma once

#include <vector>

#include "arguments/tensors.h"
#include "core/features/feature_bags.h"

namespace dynemb {

// Raises unless `part` is in [0, parts).
void check_part(const char* op, int64_t parts, int64_t part);
// Raises unless `slots` can be divided among `parts`.
void check_slots(const char* op, int64_t parts, int64_t slots);

// Ids by group, such as a table's, as pointers into memory of their device.
struct GroupedIds {
  const int64_t* ids;
  int64_t count;
  const int64_t* offsets;  // [groups + 1]
  int64_t groups;
};
// Does not read offsets.
GroupedIds grouped_tensors(const CallContext& call, const Tensor& ids, const Tensor& offsets);

// ids_concat: the ids of each feature, and the offsets of those in `ragged`. Each feature has
// `bags` bags.
std::vector<FeatureBags> feature_bags(const CallContext& call, const std::vector<Tensor>& ids,
                                      const std::vector<Tensor>& offsets,
                                      const std::vector<int64_t>& ragged, int64_t bags);

}  // namespace dynemb
