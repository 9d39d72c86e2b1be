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
  kMetaRefusedBegin = 11,   // records for ids that training refused a row
  kMetaRefusedCount = 12,
  kMetaUnscored = 13,     // of counted ids: they have neither scores nor rows
  kMetaFirstColumn = 14,  // where the rows begin in those of a wider table; a multiple of 4
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
  kTableRejected = 7,        // new ids of a call for which there was no row
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
  kSlabGeneration = 4,     // of rows that are given out for the first time, less 1: grows when
                           // rows are given back
  kSlabColumns = 8
};

// `row_clock` int64 [tables + kRowClockExtra]: optimizer step per table, then these.
enum RowClockColumn : int {
  kRowClockUpdates = 0,    // update calls over the row set
  kRowClockSinceStep = 1,  // update calls since the last optimizer.step()
  kRowClockStale = 2,      // gradients dropped because their row was given away
  kRowClockNonFinite = 3,  // gradients of rows with NaN or infinity, where these are looked for
  kRowClockExtra = 4
};

// `hyper` float64 [tables, kHyperColumns]: hyper-parameters of the table's param group.
enum HyperColumn : int {
  kHyperLr = 0,
  kHyperWeightDecay = 1,
  kHyperEps = 2,
  kHyperBeta1 = 3,
  kHyperBeta2 = 4,
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
  kHyperDownScaleBy = 18,  // gradients are divided by it; 0: they are not
  kHyperSkipIf = 19,       // not 0: the table is not updated
  kHyperColumns = 24
};

constexpr double kDecayByItself = 2.0;  // of kHyperDecoupled

}  // namespace dynemb
