// Probing one bucket, in vector form.
//
// Other threads may change slots of the bucket meanwhile. A slot takes an id by a store of its key,
// then of its handle, and loses it by a store of 0 as its handle; the key of a full bucket is not 0
// by then. So handles are loaded before keys: a handle is not seen beside an earlier key, and an id
// 0 that leaves a full bucket is not seen as an empty slot. That a handle is seen beside a later
// key is prevented by read_unmoved (moving_entries.h).
#pragma once

#include <cstring>
#include <optional>

#include "core/index/bucket.h"
#include "cpu/index/args.h"
#include "cpu/index/moving_entries.h"
#include "cpu/runtime/prefetch.h"
#include "cpu/runtime/shared_words.h"
#include "cpu/runtime/simd.h"

namespace dynemb::cpu {

typedef int64_t Words2 __attribute__((vector_size(16)));
typedef uint64_t UnsignedWords4 __attribute__((vector_size(32)));
static_assert(kBucketWidth % 4 == 0, "a bucket is probed four slots at a time");

DYNEMB_INLINE int64_t or_words(Words4 words) {
  Words2 low, high;
  std::memcpy(&low, &words, sizeof low);
  std::memcpy(&high, reinterpret_cast<const char*>(&words) + sizeof low, sizeof high);
  const Words2 either = low | high;
  return either[0] | either[1];
}

// The stored handle of `id` in the bucket, 0 if it is not there. No branch.
DYNEMB_INLINE int64_t match_stored(const int64_t* line, int64_t id) {
  const Words4 wanted = {id, id, id, id};
  Words4 found = {0, 0, 0, 0};
#pragma GCC unroll 8
  for (int j = 0; j < kBucketWidth; j += 4) {
    const Words4 stored = load_words(line + kBucketWidth + j);
    acquire_fence();
    found |= (load_words(line + j) == wanted) & stored;
  }
  return or_words(found);
}

// Slot of an id that is in the bucket.
DYNEMB_INLINE int64_t match_slot(const int64_t* line, int64_t id) {
  int64_t slot = 0;
#pragma GCC unroll 8
  for (int j = 0; j < kBucketWidth; ++j) {
    slot |= (line[j] == id && line[kBucketWidth + j] != 0) ? j : 0;
  }
  return slot;
}

// Whether the bucket has an empty slot: then it was never full, and probes need not go past it.
DYNEMB_INLINE bool has_empty_slot(const int64_t* line) {
  const Words4 zero = {0, 0, 0, 0};
  Words4 empty = zero;
#pragma GCC unroll 8
  for (int j = 0; j < kBucketWidth; j += 4) {
    const Words4 stored = load_words(line + kBucketWidth + j);
    acquire_fence();
    empty |= (load_words(line + j) | stored) == zero;
  }
  return or_words(empty) != 0;
}

DYNEMB_INLINE void prefetch_line(const int64_t* line) {
  for (int word = 0; word < kBucketWords; word += 8) prefetch_line_of(line + word);
}

// Puts an id into a free slot of the index with counters at `memory`. Id 0 in the place of a
// tombstone seems an empty slot until its handle is there.
DYNEMB_INLINE void fill_slot(const void* memory, int64_t* line, int64_t slot, int64_t id,
                             int64_t stored) {
  std::optional<MovingEntries> moving;
  if (id == 0 && line[slot] != 0) moving.emplace(memory);
  store_word(line + slot, id);
  store_word_release(line + kBucketWidth + slot, stored);
}

// Position of an id after walking its probe sequence: bucket and slot, or bucket -1.
struct SlotPosition {
  int64_t bucket;
  int64_t slot;
};
DYNEMB_INLINE SlotPosition probe(const TableView& table, int64_t id, uint64_t hash,
                                 int64_t first_probe) {
  const ProbeSequence sequence(hash, table.bucket_count);
  for (int64_t i = first_probe; i < sequence.length(); ++i) {
    const int64_t bucket = sequence.at(i);
    const int64_t* line = table.line(bucket);
    if (match_stored(line, id) != 0) return {bucket, match_slot(line, id)};
    if (has_empty_slot(line)) break;
  }
  return {-1, 0};
}

// The step word of a free slot that an id has left, or a rehash has tidied: later than any step. So
// the search for a victim skips the slot without reading its line. Other free slots have 0, as ids
// of step 0 do.
constexpr int64_t kFreeStep = INT64_MAX;

// Sets the score words of a free slot.
DYNEMB_INLINE void clear_scores(const TableView& table, int64_t bucket, int64_t slot) {
  if (table.scores == nullptr) return;
  int64_t* score = table.score(bucket, slot);
  score[0] = kFreeStep;  // kStepWord
  for (int64_t w = 1; w < table.score_words; ++w) score[w * kBucketWidth] = 0;
}

// Frees an occupied slot; true if it becomes a tombstone. A bucket that was never full needs none,
// because probes do not go past it. Threads may clear slots of one bucket at once.
DYNEMB_INLINE bool clear_slot(const TableView& table, int64_t bucket, int64_t slot) {
  int64_t* line = table.line(bucket);
  const bool tombstone = !has_empty_slot(line);
  if (tombstone && line[slot] == 0) {
    store_word_release(line + slot, kTombstoneKey);
  }
  store_word_release(line + kBucketWidth + slot, 0);
  if (!tombstone) store_word(line + slot, 0);
  clear_scores(table, bucket, slot);
  return tombstone;
}

}  // namespace dynemb::cpu
