// A live table for threads of the CPU, and their accesses to shared memory.
#pragma once

#include <cstdint>

#include "core/serving/live_index.h"
#include "core/serving/live_row.h"
#include "cpu/runtime/simd.h"

namespace dynemb::cpu {

// Memory shared by readers and the writer is accessed as whole words.
DYNEMB_INLINE int64_t load_word(const int64_t* word) {
  return __atomic_load_n(word, __ATOMIC_RELAXED);
}
DYNEMB_INLINE int64_t load_word_acquire(const int64_t* word) {
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}
DYNEMB_INLINE void store_word(int64_t* word, int64_t value) {
  __atomic_store_n(word, value, __ATOMIC_RELAXED);
}
DYNEMB_INLINE void store_word_release(int64_t* word, int64_t value) {
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
}
DYNEMB_INLINE void acquire_fence() { __atomic_thread_fence(__ATOMIC_ACQUIRE); }
DYNEMB_INLINE void release_fence() { __atomic_thread_fence(__ATOMIC_RELEASE); }

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
