// Columns of the descriptor tensors. Python names the same columns in torch_dynemb/ops/columns.py;
// a test compares the two.
#pragma once

#include <cstdint>

namespace dynemb {

// `meta` int64 [tables, kMetaColumns]: constants of a table.
enum MetaColumn : int {
  kMetaSeed = 0,
  kMetaSlab = 1,
  kMetaDim = 2,
  kMetaHasPadding = 3,
  kMetaPaddingId = 4,
  kMetaInitBegin = 5,     // first initializer record of new ids in init_data
  kMetaInitCount = 6,     // number of records
  kMetaDefaultBegin = 7,  // records for ids that are read but not in the table
  kMetaDefaultCount = 8,
  kMetaRegionBegin = 9,     // first bucket of the table's region
  kMetaRegionBuckets = 10,  // buckets in the region
  kMetaRefusedBegin = 11,   // records for ids that were refused a row
  kMetaRefusedCount = 12,
  kMetaUnscored = 13,     // 1: a table of counted ids, which have neither scores nor rows
  kMetaFirstColumn = 14,  // where the rows begin in those of a wider table; a multiple of 4
  kMetaTiered = 15,       // 1: rows are cached in slots; rows without a slot lie in a store
  kMetaColumns = 16
};

// `tables` int64 [tables, kTableColumns]: the index state of a table, changed in the forward.
enum TableColumn : int {
  kTableBucketCount = 0,
  kTableSize = 1,
  kTableTombstones = 2,
  kTableInserted = 3,
  kTableGrowths = 4,
  kTableErased = 5,
  kTableEvicted = 6,
  kTableRejected = 7,        // new ids of a call without room
  kTableNotAdmitted = 8,     // new ids of a call that were not admitted
  kTableFound = 9,           // occurrences in training lookups
  kTableMissed = 10,         // occurrences, padding not counted
  kTableDefaultServed = 11,  // occurrences of ids without a row
  kTableColumns = 16
};

// `slabs` int64 [slabs, kSlabColumns]: allocation of the rows of one dim.
enum SlabColumn : int {
  kSlabNextRow = 0,
  kSlabFreeCount = 1,
  kSlabCommittedRows = 2,  // rows for which available memory has been checked
  kSlabRowBytes = 3,       // weights, generation and optimizer state of a row, in bytes
  kSlabGeneration = 4,     // of rows that are given out for the first time, less 1: grows when rows
                           // are freed
  kSlabColumns = 8
};

// `slots` int64 [slots, kSlotColumns]: the rows that a tiered slab has in memory, or in HBM.
enum SlotColumn : int {
  kSlotOwner = 0,  // handle of the row + 1; 0: the slot is free
  kSlotId = 1,     // owner of the row; in a free slot: 0
  kSlotUse = 2,    // epoch of the last use : 32 | how often it was used : 32
  kSlotMarks = 3,  // table : 15 | job : 19 | dirty : 1 | the slot's own generation : 28
  kSlotColumns = 4
};

// `free_slots` int32 [slots]: a stack of the free slots below kTierUsed; its height is
// kTierFreeCount.

// `tier_clock` int64 [1 + slabs, kTierColumns]. The first row is the group's, the others are those
// of slabs.
enum TierHeadColumn : int {
  kTierEpoch = 0,     // training steps, and reads between them
  kTierTraining = 1,  // training lookups since the last step
  // Where rows have homes (core/storage/homes.h):
  kTierInPlace = 2,       // ids that were served at their home
  kTierLoaded = 3,        // rows copied from their home into a slot
  kTierLoadedBytes = 4,   // their bytes
  kTierWrittenBytes = 5,  // bytes of dirty rows copied to their home
};
enum TierColumn : int {
  kTierLimit = 0,       // target number of slots of the cache
  kTierUsed = 1,        // slots that have been used; later ones are untouched
  kTierCursor = 2,      // slot at which the search for victims goes on
  kTierFreeCount = 3,   // free slots below kTierUsed
  kTierTouches = 4,     // uses since counts were halved
  kTierHits = 5,        // ids with their row in a slot, every occurrence counted
  kTierMisses = 6,      // rows loaded into a slot for a lookup
  kTierPrefetched = 7,  // rows loaded into a slot for a prefetch
  kTierEvicted = 8,     // rows that lost their slot to others
  kTierWritten = 9,     // dirty rows sent to the store
  kTierMostUsed = 10,   // most slots in use since the last step
  kTierStale = 11,      // ids with a stale handle
  kTierSlotBytes = 12,  // memory of a slot with its row
  // Where rows have homes:
  kTierWorth = 13,    // threshold of the last histogram,
  kTierTies = 14,     // rows of that worth that may still lose their slots,
  kTierPortion = 15,  // and rows up to that worth
  kTierColumns = 16
};

// `moves` int64 [moves, kMoveColumns]: rows that move between slots and a store.
enum MoveColumn : int {
  kMoveSlab = 0,
  kMoveLoads = 1,  // 0: from the slot to the store, 1: from the store to the slot
  kMoveSlot = 2,
  kMoveHandle = 3,  // of the row
  kMoveId = 4,
  kMoveTable = 5,
  kMoveGeneration = 6,  // of the slot, with which the row is live there
  kMoveColumns = 7
};

// `tables` int64 [tables, kLiveTableColumns] of live tables, which are read during updates. Readers
// use kLiveTableActive only, which has a cache line of its own.
enum LiveTableColumn : int {
  kLiveTableActive = 0,    // number of rehashes of the index; the last bit selects the range
  kLiveTableSize = 8,      // ids
  kLiveTableCapacity = 9,  // largest number of ids
  kLiveTableTombstones = 10,
  kLiveTableInserted = 11,  // this and the following count from the creation of the table
  kLiveTableUpdated = 12,
  kLiveTableErased = 13,
  kLiveTableBatches = 14,  // accepted updates
  kLiveTableColumns = 16
};

// Column of the first row of `tables` of served tables, frozen or live: 1 if threads that hold
// Python's lock may release it during a lookup.
constexpr int kServedUnlocks = 15;
static_assert(int{kTableDefaultServed} < kServedUnlocks && int{kLiveTableBatches} < kServedUnlocks,
              "a column without other use");

// `free` int64 [slabs, kLiveSlabColumns]: rows of live tables without an owner.
enum LiveSlabColumn : int {
  kLiveSlabNextRow = 0,    // first row that has never had an owner
  kLiveSlabFreeHead = 1,   // a free row below it + 1; 0: none
  kLiveSlabFreeCount = 2,  // number of free rows
  kLiveSlabColumns = 4
};

// `row_clock` int64 [tables + kRowClockExtra]: optimizer step per table, then these.
enum RowClockColumn : int {
  kRowClockUpdates = 0,    // update calls over the row set
  kRowClockSinceStep = 1,  // update calls since the last optimizer.step()
  kRowClockStale = 2,      // gradients dropped because of a stale handle
  kRowClockNonFinite = 3,  // gradients of rows with NaN or infinity, if counted
  kRowClockExtra = 4
};
// In kRowClockUpdates: the tables were replaced by others, and nothing reads them any more.
constexpr int64_t kTablesReplaced = -1;

// `hyper` float64 [tables, kHyperColumns]: hyper-parameters of the table's param group.
enum HyperColumn : int {
  kHyperLr = 0,
  kHyperWeightDecay = 1,
  kHyperEps = 2,
  kHyperBeta1 = 3,         // or the dampening of MomentumSgd
  kHyperBeta2 = 4,         // or the decay of other mean squares
  kHyperInitialState = 5,  // of a fresh row's first state tensor (Adagrad's initial accumulator);
                           // the others start at 0
  kHyperMomentum = 6,
  kHyperNesterov = 7,     // 0 or 1
  kHyperDecoupled = 8,    // 0: weight decay is added to the gradient, 1: times lr it shrinks the
                          // weight, 2: it shrinks the weight by itself
  kHyperClipValue = 9,    // infinity or 0: off
  kHyperClipNorm = 10,    // of a row's gradient; infinity or 0: off
  kHyperNonFinite = 11,   // NonFinite
  kHyperStochastic = 12,  // 0 or 1: rounding of rows and state below float32
  kHyperL1 = 13,
  kHyperRidge = 14,
  kHyperGroup = 15,
  kHyperTrust = 16,
  kHyperBeta = 17,
  kHyperDownScaleBy = 18,   // divisor of gradients; 0: none
  kHyperSkipIf = 19,        // not 0: the table is not updated
  kHyperMaximize = 20,      // 0 or 1: gradients are negated
  kHyperLrDecay = 21,       // lr / (1 + (step - 1) * this), step of the table
  kHyperArAlpha = 22,       // times lr: share by which a row shrinks per step since its last update
  kHyperMinShrinkage = 23,  // least factor of that
  kHyperColumns = 24
};

constexpr double kDecayByItself = 2.0;  // of kHyperDecoupled

// Columns of store_stats, int64 [kStoreStatColumns], counted since the store was opened.
enum StoreStatColumn : int {
  kStoreStatReads = 0,  // records
  kStoreStatBytesRead = 1,
  kStoreStatWrites = 2,  // records
  kStoreStatBytesWritten = 3,
  kStoreStatCollected = 4,  // records copied by garbage collection
  kStoreStatLiveRecords = 5,
  kStoreStatSegments = 6,
  kStoreStatPinnedSegments = 7,  // needed by snapshots
  kStoreStatDiskBytes = 8,
  kStoreStatQueued = 9,  // jobs
  kStoreStatMostQueued = 10,
  kStoreStatWaitedUs = 11,  // time that callers have waited for jobs
  kStoreStatIo = 12,        // the IoPath in use
  kStoreStatColumns = 16
};

}  // namespace dynemb
