// Slots of a cache in HBM for the rows of a call (stage.cu).
#pragma once

#include <vector>

#include "core/columns.h"
#include "cuda/runtime/launch.h"
#include "cuda/storage/caches.h"

namespace dynemb::cuda {

struct StagedIds {
  const Tensor& meta;
  const Tensor& ids;
  const Tensor& handles;
  const Tensor& offsets;
  const std::vector<int64_t>& feature_tables;
};

// Words of the report of a slab without homes: these, then kMovedWords for each row with a slot.
enum ReportWord : int {
  kReportWanted = 0,   // rows that had no slot
  kReportGiven = 1,    // rows that got one
  kReportUsed = 2,     // before the call: kTierUsed,
  kReportFree = 3,     // kTierFreeCount,
  kReportVictims = 4,  // and rows that could lose their slots
  kReportHead = 5
};
enum MovedWord : int {
  kMovedSlot = 0,
  kMovedHandle = 1,  // of the row that gets the slot
  kMovedId = 2,
  kMovedTable = 3,
  kMovedGeneration = 4,  // of the slot, with which the row will be live there
  kMovedSaved = 5,       // handle of the row that has to be saved; -1: none
  kMovedSavedId = 6,
  kMovedSavedTable = 7,
  kMovedSavedGeneration = 8,
  kMovedWords = 9
};

// The rows of a slab without homes. A call gives all of them slots, or none.
struct SlabReport {
  volatile int64_t* words = nullptr;  // device address; nullptr: the slab is left out
  int64_t slots = 0;                  // as many may be used even beyond the limit
  bool repeated = false;              // the slab has refused the call before
};

// Launches the kernels of a call; `out` gets the handles to use in place of those of rows. `ahead`:
// 0 for a lookup. `reports`: by slab, if slabs have no homes; otherwise all rows move to their
// slots.
void stage_rows(const Call& call, const CachedGroup& group, const StagedIds& given, bool trains,
                int64_t ahead, const std::vector<SlabReport>& reports, const Tensor& out);

}  // namespace dynemb::cuda
