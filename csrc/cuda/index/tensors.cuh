// The index on the device: tensors as pointers, the ids of a call by feature, probing.
#pragma once

#include "core/columns.h"
#include "core/index/bucket.h"
#include "cuda/runtime/dedupe.cuh"
#include "cuda/runtime/offsets.cuh"

namespace dynemb::cuda {

static_assert(kBucketWidth % 2 == 0, "a line is loaded 16 bytes at a time");

// Content of a handle tensor during an insertion: kMissBase - slot of the dedupe table.
constexpr int64_t kMissBase = -4;

struct IndexArgs {
  int64_t* buckets;
  int64_t* scores;  // nullptr: the index keeps no scores
  int64_t* tables;
  const int64_t* meta;
  int64_t table_count;
  int64_t score_words;  // 0: as above

  __device__ int64_t* table_row(int64_t table) const { return tables + table * kTableColumns; }
  __device__ const int64_t* meta_row(int64_t table) const { return meta + table * kMetaColumns; }
};

struct TableView {
  int64_t* lines;
  int64_t* scores;
  int64_t score_words;
  int64_t bucket_count;
  uint64_t salt;

  __device__ __forceinline__ int64_t* line(int64_t bucket) const {
    return lines + bucket * kBucketWords;
  }
  // Words of a slot are kBucketWidth apart.
  __device__ __forceinline__ int64_t* score(int64_t bucket, int slot) const {
    return scores + bucket * kBucketWidth * score_words + slot;
  }
};

__device__ __forceinline__ TableView table_view(const IndexArgs& index, int64_t table) {
  const int64_t* meta = index.meta_row(table);
  const int64_t begin = meta[kMetaRegionBegin];
  TableView view;
  view.lines = index.buckets + begin * kBucketWords;
  const bool scored = index.scores != nullptr && meta[kMetaUnscored] == 0;
  view.scores = scored ? index.scores + begin * kBucketWidth * index.score_words : nullptr;
  view.score_words = scored ? index.score_words : 0;
  view.bucket_count = index.table_row(table)[kTableBucketCount];
  view.salt = bucket_salt(meta[kMetaSeed]);
  return view;
}

// Ids of a call: feature f has ids [offsets[f * batch], offsets[(f + 1) * batch]). Without offsets
// all are in the one bag of the one feature.
struct FeatureArgs {
  const int64_t* ids;
  int64_t count;
  const int64_t* offsets;
  int64_t batch;
  int64_t features;
  const int64_t* table;  // of each feature, on the device

  // Number of threads of a kernel with one per id, and one per offset that it checks.
  int64_t threads() const {
    const int64_t bags = features * batch > 1 ? features * batch : 1;
    return count > bags ? count : bags;
  }

  // The feature of the id at `position`.
  __device__ __forceinline__ int64_t feature_of(int64_t position) const {
    if (features == 1) return 0;
    return last_where(features, [&](int64_t f) { return offsets[f * batch] <= position; });
  }
  __device__ __forceinline__ int64_t table_of(int64_t position) const {
    return table[feature_of(position)];
  }
  // The bag of the id at `position`: the last one that begins at or before it.
  __device__ __forceinline__ int64_t bag_of(int64_t position) const {
    return part_of(offsets, features * batch, position);
  }
  // An unchecked offset.
  __device__ __forceinline__ int64_t given_offset(int64_t bag) const {
    if (offsets == nullptr) return bag == 0 ? 0 : count;
    return offsets[bag];
  }
  // An offset, clamped to the range.
  __device__ __forceinline__ int64_t offset(int64_t bag) const {
    return clipped_offset(given_offset(bag), count);
  }
};

// Called by more threads than there are bags; false if this thread's offset is wrong.
__device__ __forceinline__ bool check_offset(const FeatureArgs& features, const ErrorSink& errors,
                                             int64_t i) {
  return features.offsets == nullptr ||
         check_offset(features.offsets, features.features * features.batch, features.count, i,
                      errors);
}

struct Line {
  int64_t key[kBucketWidth];
  int64_t stored[kBucketWidth];
};

// All loads of a line are started before the first is used.
__device__ __forceinline__ Line load_line(const int64_t* line) {
  longlong2 pair[kBucketWidth];
#pragma unroll
  for (int i = 0; i < kBucketWidth; ++i) pair[i] = reinterpret_cast<const longlong2*>(line)[i];
  Line result;
#pragma unroll
  for (int i = 0; i < kBucketWidth / 2; ++i) {
    result.key[2 * i] = pair[i].x;
    result.key[2 * i + 1] = pair[i].y;
    result.stored[2 * i] = pair[kBucketWidth / 2 + i].x;
    result.stored[2 * i + 1] = pair[kBucketWidth / 2 + i].y;
  }
  return result;
}

__device__ __forceinline__ bool has_empty_slot(const Line& line) {
  bool empty = false;
#pragma unroll
  for (int i = 0; i < kBucketWidth; ++i) empty |= line.key[i] == 0 && line.stored[i] == 0;
  return empty;
}

// The slot of `id` in the line, or -1.
__device__ __forceinline__ int match_slot(const Line& line, int64_t id) {
  int slot = -1;
#pragma unroll
  for (int i = 0; i < kBucketWidth; ++i) {
    if (line.key[i] == id && line.stored[i] != 0) slot = i;
  }
  return slot;
}

struct FoundSlot {
  int64_t stored;  // 0: missing
  int64_t bucket;
  int slot;
  bool never_full;  // the bucket has an empty slot
};

__device__ __forceinline__ FoundSlot find_slot(const TableView& table, int64_t id) {
  const uint64_t hash = first_hash(id, table.salt);
  const ProbeSequence sequence(hash, table.bucket_count);
  for (int64_t probe = 0; probe < sequence.length(); ++probe) {
    const int64_t bucket = sequence.at(probe);
    const Line line = load_line(table.line(bucket));
    const bool empty = has_empty_slot(line);
    const int slot = match_slot(line, id);
    if (slot >= 0) {
      int64_t stored = 0;
#pragma unroll
      for (int i = 0; i < kBucketWidth; ++i) {
        if (i == slot) stored = line.stored[i];
      }
      return {stored, bucket, slot, empty};
    }
    if (empty) break;
  }
  return {0, 0, 0, false};
}

// A slot and whether its bucket was never full, in one word.
struct SlotPlace {
  int64_t bucket;
  int slot;
  bool never_full;
};
__device__ __forceinline__ int64_t pack_place(const SlotPlace& place) {
  return 2 * (place.bucket * kBucketWidth + place.slot) + (place.never_full ? 1 : 0);
}
__device__ __forceinline__ SlotPlace unpack_place(int64_t word) {
  const int64_t slot = word / 2;
  return {slot / kBucketWidth, static_cast<int>(slot % kBucketWidth), word % 2 != 0};
}

// Frees an occupied slot; true if it becomes a tombstone. A bucket that was never full needs none,
// because probes do not go past it. An earlier kernel must have determined which it is, since other
// threads clear slots of the same bucket.
__device__ __forceinline__ bool clear_slot(const TableView& table, const SlotPlace& place) {
  int64_t* line = table.line(place.bucket);
  if (place.never_full) {
    line[place.slot] = 0;
  } else if (line[place.slot] == 0) {
    line[place.slot] = kTombstoneKey;
  }
  line[kBucketWidth + place.slot] = 0;
  for (int64_t w = 0; w < table.score_words; ++w) {
    table.score(place.bucket, place.slot)[w * kBucketWidth] = 0;
  }
  return !place.never_full;
}

// The slot in the dedupe table of a table's id at `position`.
__device__ __forceinline__ int64_t dedupe_id(const DedupeTable& dedupe, const FeatureArgs& features,
                                             int64_t position, int64_t id, int64_t table) {
  const uint64_t hash = fmix64(static_cast<uint64_t>(id) + static_cast<uint64_t>(table));
  return dedupe.insert(hash, position, [&](int32_t other) {
    return features.ids[other] == id &&
           (features.features == 1 || features.table[features.feature_of(other)] == table);
  });
}

// Whether position i holds the first occurrence of an id in the dedupe table: `work` holds
// kMissBase - slot there, and more than kMissBase for all other ids.
__device__ __forceinline__ bool is_first(const FeatureArgs& features, const DedupeTable& dedupe,
                                         const int64_t* work, int64_t i) {
  if (i >= features.count) return false;
  const int64_t held = work[i];
  return held <= kMissBase && dedupe.is_first(kMissBase - held, i);
}

}  // namespace dynemb::cuda
