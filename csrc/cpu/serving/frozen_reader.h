// Reads rows of a frozen table by id: ids are found and their rows read in one pass, with several
// blocks of ids in flight.
//
// All rows of a frozen table belong to its ids, so generations are not read and handles are not
// stored: an id costs the line of its bucket and its row.
#pragma once

#include <algorithm>

#include "cpu/index/probe_block.h"
#include "cpu/rows/args.h"

namespace dynemb::cpu {

// Ids go through four stages, a block at each: the line of the first bucket is fetched; then the
// row, or the line of the second bucket; then that row, too; then rows are read.
struct FrozenBlock {
  int64_t begin;
  int64_t count;
  uint64_t hash[kProbeBlock];
  int64_t bucket[kProbeBlock];
  const char* row[kProbeBlock];  // nullptr: missing
  int32_t later[kProbeBlock];    // ids outside their first bucket
  int64_t later_count;
  bool complete;  // no id is missing
};

// Turns the stored handle of an id into the address of its row, and fetches the row.
struct RowFetch {
  const char* weights;
  int64_t row_bytes;
  int64_t rows;
  int64_t fetched;      // bytes of a row to fetch at first; the rest follows
  int64_t damaged = 0;  // negative: a handle named a row that does not exist

  explicit RowFetch(const TableRows& table)
      : weights(table.weights),
        row_bytes(table.row_bytes),
        rows(table.rows),
        fetched(std::min<int64_t>(table.row_bytes, 512)) {}

  // For an id that was found. Prefetching an invalid address is harmless.
  DYNEMB_INLINE const char* operator()(int64_t stored) {
    const int64_t number = handle_row(decode_handle(stored));
    damaged |= stored | (rows - 1 - number);
    const char* row = reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(weights) +
                                                    static_cast<uintptr_t>(number) *
                                                        static_cast<uintptr_t>(row_bytes));
    __builtin_prefetch(row);
    for (int64_t byte = 64; byte < fetched; byte += 64) __builtin_prefetch(row + byte);
    // rows of partial cache lines may end in one more
    if (row_bytes % 64 != 0) __builtin_prefetch(row + fetched - 1);
    return row;
  }
};

// Rows of ids in their first bucket; the others are left for later.
DYNEMB_INLINE void match_first_buckets(const TableView& index, const int64_t* ids,
                                       FrozenBlock& block, RowFetch& fetch) {
  int64_t later = 0;
  const auto take = [&](int64_t i, int64_t stored) {
    block.row[i] = fetch(stored);
    block.later[later] = static_cast<int32_t>(i);
    later += stored == 0;
  };
  const int64_t* const lines = index.lines;
  int64_t i = 0;
  for (; i + 4 <= block.count; i += 4) {
    const Words4 stored = match_four(lines, block.bucket + i, ids + i);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) take(i + j, stored[j]);
  }
  for (; i < block.count; ++i) take(i, match_stored(index.line(block.bucket[i]), ids[i]));
  block.later_count = later;
}

// For the ids that were left: an id with a first bucket that was never full is missing; otherwise
// the line of the second bucket is fetched.
DYNEMB_INLINE void fetch_second_buckets(const TableView& index, FrozenBlock& block) {
  int64_t going_on = 0;
  block.complete = true;
  for (int64_t l = 0; l < block.later_count; ++l) {
    const int32_t i = block.later[l];
    const bool ends = has_empty_slot(index.line(block.bucket[i]));
    block.row[i] = nullptr;
    block.complete &= !ends;
    block.later[going_on] = i;
    going_on += !ends;
    block.bucket[i] = bucket_of(second_hash(block.hash[i]), index.bucket_count);
    prefetch_line(index.line(block.bucket[i]));
  }
  block.later_count = going_on;
}

DYNEMB_INLINE void match_second_buckets(const TableView& index, const int64_t* ids,
                                        FrozenBlock& block, RowFetch& fetch) {
  for (int64_t l = 0; l < block.later_count; ++l) {
    const int64_t i = block.later[l];
    int64_t stored = match_stored(index.line(block.bucket[i]), ids[i]);
    if (stored == 0) {
      const SlotPosition position = probe(index, ids[i], block.hash[i], 1);
      if (position.bucket < 0) {
        block.complete = false;
        continue;
      }
      stored = index.line(position.bucket)[kBucketWidth + position.slot];
    }
    block.row[i] = fetch(stored);
  }
}

// Reads `count` ids, in order: sink.take(first, row, count, complete) gets the rows of some ids,
// nullptr for missing ones, and whether none is missing. Returns the first of some ids of which one
// has an invalid row, and which the sink has not received; -1: none.
template <class Sink>
DYNEMB_INLINE int64_t read_frozen(const TableView& index, const TableRows& rows, const int64_t* ids,
                                  int64_t count, Sink& sink) {
  constexpr int64_t kStages = 4;
  FrozenBlock blocks[kStages];
  RowFetch fetch(rows);
  const int64_t total = (count + kProbeBlock - 1) / kProbeBlock;
  for (int64_t b = 0; b < total + kStages - 1; ++b) {
    if (b < total) {
      FrozenBlock& block = blocks[b % kStages];
      block.begin = b * kProbeBlock;
      block.count = std::min(kProbeBlock, count - block.begin);
      fetch_lines(index, ids + block.begin, block.count, block.hash, block.bucket);
    }
    if (b >= 1 && b - 1 < total) {
      FrozenBlock& block = blocks[(b - 1) % kStages];
      match_first_buckets(index, ids + block.begin, block, fetch);
      fetch_second_buckets(index, block);
    }
    if (b >= 2 && b - 2 < total) {
      FrozenBlock& block = blocks[(b - 2) % kStages];
      match_second_buckets(index, ids + block.begin, block, fetch);
    }
    if (fetch.damaged < 0) return std::max<int64_t>(b - 3, 0) * kProbeBlock;
    if (b < 3) continue;
    const FrozenBlock& block = blocks[(b - 3) % kStages];
    sink.take(block.begin, block.row, block.count, block.complete);
  }
  return -1;
}

}  // namespace dynemb::cpu
