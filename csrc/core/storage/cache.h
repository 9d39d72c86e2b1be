// The cache of a tiered slab: fields of slots. core/storage/victims.h decides which rows lose them.
//
// A slot handle is slot : 36 | the slot's own generation : 28, so ops on handles of rows take it as
// it is. The generation grows whenever the slot gets another row; handles of the earlier row become
// stale (core/index/handle.h).
#pragma once

#include <cstdint>

#include "core/columns.h"
#include "core/host_device.h"
#include "core/index/handle.h"

namespace dynemb {

constexpr int64_t kSlotDirty = int64_t{1} << kGenerationBits;
// The last job that moves a row out of the slot or into it. Jobs are counted; the last bits of
// their numbers distinguish the unfinished ones.
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

// The unfinished job with these last bits, after `done` and up to `last`; `done` if there is none.
DYNEMB_HD int64_t unfinished_job(int64_t bits, int64_t done, int64_t last) {
  const int64_t ahead = (bits - done) & kSlotJobMask;
  return ahead <= last - done ? done + ahead : done;
}

// Place of a row without a slot while the job that saves its changes may be unfinished. Other rows
// without a slot have 0, with or without a record.
constexpr int32_t kSavedPlace = -2;

// Epochs are compared as 32-bit numbers that may wrap around.
DYNEMB_HD uint32_t use_epoch(int64_t use) { return static_cast<uint32_t>(use >> 32); }
DYNEMB_HD uint32_t use_count(int64_t use) { return static_cast<uint32_t>(use); }
DYNEMB_HD int64_t slot_use(uint32_t epoch, uint32_t count) {
  return static_cast<int64_t>(static_cast<uint64_t>(epoch) << 32 | count);
}
// Whether a slot last used in epoch `last` may be taken from its row: its epoch is earlier than the
// present one. Prefetched rows have later epochs.
DYNEMB_HD bool epoch_is_past(uint32_t last, uint32_t now) {
  return static_cast<int32_t>(last - now) < 0;
}

}  // namespace dynemb
