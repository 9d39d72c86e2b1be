// Distinct ids of groups, before it is known where they go.
#pragma once

#include <vector>

#include "cpu/index/view.h"
#include "cpu/runtime/scratch.h"

namespace dynemb::cpu {

// Ids of groups, checked: group g is [begin[g], begin[g + 1]).
struct GroupedIds {
  const int64_t* ids;
  const int64_t* begin;
  int64_t count;
  int64_t groups;
};
GroupedIds grouped_ids(const char* op, const Tensor& ids, const Tensor& offsets);

// The distinct ids of group g are ids[begin[g] ..] and as many after it as sizes[g] says, in order
// of first occurrence; counts likewise.
struct GroupedUnique {
  Scratch<int64_t> ids;
  Scratch<int64_t> counts;
  std::vector<int64_t> sizes;
};
// Writes for each id its number among the distinct ids of its group.
GroupedUnique unique_of_groups(const GroupedIds& groups, int64_t* inverse);

}  // namespace dynemb::cpu
