// Distinct ids of groups, before it is known where they go.
#pragma once

#include <vector>

#include "arguments/routing.h"
#include "core/index/hash.h"
#include "cpu/index/args.h"
#include "cpu/runtime/scratch.h"

namespace dynemb::cpu {

// Checks also the values of offsets.
GroupedIds grouped_ids(const char* op, const Tensor& ids, const Tensor& offsets);

// Numbers the distinct ids of a group at a time; its memory, and the caches it lies in, serve the
// groups of a thread one after another.
class DistinctNumbers {
 public:
  // Writes for each id its number among the distinct ids, which are numbered in order of first
  // occurrence; gives how many there are. At most INT32_MAX ids.
  int64_t number(const int64_t* ids, int64_t count, int64_t* number_of_id);

  // The distinct ids of the last call, until the next one.
  const int64_t* ids() const { return distinct_.data(); }

 private:
  Scratch<int32_t> slots_;  // numbers of ids: linear probing, at most half full
  Scratch<int64_t> distinct_;
};

}  // namespace dynemb::cpu
