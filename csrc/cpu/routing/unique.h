// Distinct ids of groups, before their place is known.
#pragma once

#include <vector>

#include "arguments/routing.h"
#include "core/index/hash.h"
#include "cpu/index/args.h"
#include "cpu/runtime/scratch.h"

namespace dynemb::cpu {

// Also checks the values of offsets.
GroupedIds grouped_ids(const char* op, const Tensor& ids, const Tensor& offsets);

// Numbers the distinct ids of one group at a time. Its memory, in the caches, is reused for the
// groups of a thread.
class DistinctNumbers {
 public:
  // Writes the number of each id among the distinct ids, in order of first occurrence; returns how
  // many there are. At most INT32_MAX ids.
  int64_t number(const int64_t* ids, int64_t count, int64_t* number_of_id);

  // The distinct ids of the last call, until the next one.
  const int64_t* ids() const { return distinct_.data(); }

 private:
  Scratch<int32_t> slots_;  // numbers of ids: linear probing, at most half full
  Scratch<int64_t> distinct_;
};

}  // namespace dynemb::cpu
