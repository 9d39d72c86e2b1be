// Changes of the slots of a cache. One thread at a time changes owners, places and the stack of
// free slots.
#pragma once

#include <cstdint>
#include <vector>

#include "arguments/tiers.h"
#include "core/storage/cache.h"
#include "cpu/storage/row_store.h"

namespace dynemb::cpu {

inline int64_t* slot_at(const CacheSlab& cache, int64_t slot) {
  return cache.slots + slot * kSlotColumns;
}

// Adds to a counter; one at the limit, which only damage produces, wraps around.
inline void add_to(int64_t* counter, int64_t more) {
  *counter = static_cast<int64_t>(static_cast<uint64_t>(*counter) + static_cast<uint64_t>(more));
}

inline RowMove move_of(const int64_t* words, int64_t slot) {
  return {slot, words[kSlotOwner] - 1, words[kSlotId], slot_table(words[kSlotMarks]),
          slot_generation(words[kSlotMarks])};
}

// Removes the owner of a slot. The caller gives the slot to another row or pushes it.
inline void clear_slot(int64_t* words) {
  words[kSlotOwner] = 0;
  words[kSlotId] = 0;
  words[kSlotMarks] =
      slot_marks(0, slot_job(words[kSlotMarks]), false, slot_generation(words[kSlotMarks]));
}

inline void push_free_slot(const CacheSlab& cache, int64_t slot) {
  cache.free_slots[cache.clock[kTierFreeCount]++] = static_cast<int32_t>(slot);
}

// Takes the row out of a slot. A dirty row is saved first, by job `job`, or 0: at once. The caller
// gives the slot to another row or pushes it.
inline void evict(const CacheSlab& cache, int64_t slot, int64_t job, std::vector<RowMove>* saves) {
  int64_t* words = slot_at(cache, slot);
  int32_t place = 0;
  if (slot_is_dirty(words[kSlotMarks])) {
    saves->push_back(move_of(words, slot));
    add_to(&cache.clock[kTierWritten], 1);
    if (job > 0) {
      place = kSavedPlace;
      words[kSlotMarks] = slot_marks(0, job, false, slot_generation(words[kSlotMarks]));
    }
  }
  const int64_t row = handle_row(words[kSlotOwner] - 1);
  if (row < cache.max_rows && cache.places[row] == slot + 1) cache.places[row] = place;
  add_to(&cache.clock[kTierEvicted], 1);
  clear_slot(words);
}

}  // namespace dynemb::cpu
