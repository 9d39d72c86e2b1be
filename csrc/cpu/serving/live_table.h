// A live table for threads of the CPU, and their accesses to shared memory.
#pragma once

#include <cstdint>

#include "core/serving/live_index.h"
#include "core/serving/live_row.h"
#include "cpu/runtime/shared_words.h"

namespace dynemb::cpu {

struct LiveTable {
  int64_t* lines;         // of both ranges
  int64_t range_buckets;  // of each
  int64_t* active;        // number of rehashes
  uint64_t salt;
  int64_t* rows;  // of the slab
  int64_t row_count;
  int64_t row_words;
  int64_t dim;
  Storage format;

  int64_t* range(int64_t rehashes) const {
    return lines + (rehashes & 1) * range_buckets * kBucketWords;
  }
  int64_t* row(int64_t number) const { return rows + number * row_words; }
};

template <class Word>  // int64_t, or const
DYNEMB_INLINE Word* line_of(Word* range, int64_t bucket) {
  return range + bucket * kBucketWords;
}

}  // namespace dynemb::cpu
