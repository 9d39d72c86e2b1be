// The cache of a tiered slab: what a slot says of the row in it, and which row goes first.
//
// A slot handle is slot : 36 | the slot's own generation : 28, so ops that take handles of rows
// take it as it is. The generation goes up whenever the slot gets another row; a handle of the row
// before is stale then, as one of a row's earlier owner is (core/index/handle.h).
#pragma once

#include <cstdint>

#include "core/columns.h"
#include "core/host_device.h"
#include "core/index/handle.h"

namespace dynemb {

constexpr int64_t kSlotDirty = int64_t{1} << kGenerationBits;
// The last job that moves a row out of the slot or into it. Jobs are counted; of their numbers, the
// last bits tell those apart that are not done.
constexpr int kSlotJobShift = kGenerationBits + 1;
constexpr int kSlotJobBits = 19;
constexpr int64_t kSlotJobMask = (int64_t{1} << kSlotJobBits) - 1;
constexpr int kSlotTableShift = kSlotJobShift + kSlotJobBits;
constexpr int64_t kMostTables = int64_t{1} << (63 - kSlotTableShift);

DYNEMB_HD int32_t slot_generation(int64_t marks) {
  return static_cast<int32_t>(marks & kGenerationMask);
}
DYNEMB_HD bool slot_is_dirty(int64_t marks) { return (marks & kSlotDirty) != 0; }
DYNEMB_HD int32_t slot_table(int64_t marks) {
  return static_cast<int32_t>(marks >> kSlotTableShift);
}
DYNEMB_HD int64_t slot_job(int64_t marks) { return marks >> kSlotJobShift & kSlotJobMask; }
DYNEMB_HD int64_t slot_marks(int64_t table, int64_t job, bool dirty, int64_t generation) {
  return table << kSlotTableShift | (job & kSlotJobMask) << kSlotJobShift |
         (dirty ? kSlotDirty : 0) | generation;
}

// A job with these last bits that is not done, of those after `done` and up to `last`; `done` if
// there is none.
DYNEMB_HD int64_t unfinished_job(int64_t bits, int64_t done, int64_t last) {
  const int64_t ahead = (bits - done) & kSlotJobMask;
  return ahead <= last - done ? done + ahead : done;
}

// Place of a row without a slot whose changes went to the store, where the job that takes them
// there may not be done. Other rows without a slot have 0, whether they have a record or not.
constexpr int32_t kSavedPlace = -2;

// Epochs are compared as 32-bit numbers that may wrap around.
DYNEMB_HD uint32_t use_epoch(int64_t use) { return static_cast<uint32_t>(use >> 32); }
DYNEMB_HD uint32_t use_count(int64_t use) { return static_cast<uint32_t>(use); }
DYNEMB_HD int64_t slot_use(uint32_t epoch, uint32_t count) {
  return static_cast<int64_t>(static_cast<uint64_t>(epoch) << 32 | count);
}
// Whether a slot whose last use is `last` may be taken from its row: nothing of this epoch, nor of
// later ones, for which rows are fetched ahead.
DYNEMB_HD bool epoch_is_past(uint32_t last, uint32_t now) {
  return static_cast<int32_t>(last - now) < 0;
}

// What a slot is worth: first how often its row was used, where counts are halved from time to
// time, then how long ago. The least ones go first.
constexpr int kWorthCounts = 64;
constexpr int kWorthAges = 64;
constexpr int kWorths = kWorthCounts * kWorthAges;

// 2 log2(age), of whose fraction one bit is kept.
DYNEMB_HD int age_class(uint32_t age) {
  int log = 0;
  for (uint32_t left = age; left > 1; left >>= 1) ++log;
  const int half = log > 0 ? static_cast<int>(age >> (log - 1) & 1) : 0;
  return 2 * log + half;
}
DYNEMB_HD int slot_worth(int64_t use, uint32_t now) {
  const uint32_t count = use_count(use);
  const int counted = count < kWorthCounts ? static_cast<int>(count) : kWorthCounts - 1;
  return counted * kWorthAges + kWorthAges - 1 - age_class(now - use_epoch(use));
}

// Counts are halved when there were so many uses for each slot.
constexpr int64_t kUsesBeforeHalving = 8;
// Part of the slots that are taken from their rows at once.
constexpr int64_t kSlotsPerSweep = 64;

}  // namespace dynemb
