// Distinct ids of groups, before it is known where they go.
#pragma once

#include <vector>

#include "arguments/routing.h"
#include "cpu/index/args.h"
#include "cpu/runtime/scratch.h"

namespace dynemb::cpu {

// Checks also the values of offsets.
GroupedIds grouped_ids(const char* op, const Tensor& ids, const Tensor& offsets);

// The distinct ids of group g are ids[offsets[g] ..] and as many after it as sizes[g] says, in
// order of first occurrence; counts likewise.
struct GroupedUnique {
  Scratch<int64_t> ids;
  Scratch<int64_t> counts;
  std::vector<int64_t> sizes;
};
// Writes for each id its number among the distinct ids of its group.
GroupedUnique unique_of_groups(const GroupedIds& groups, int64_t* inverse);

}  // namespace dynemb::cpu
