// Reads rows of a frozen table by id: ids are found and their rows read in one pass, with several
// blocks of ids in flight.
//
// All rows of a frozen table belong to its ids, so generations are not read and handles are not
// stored: an id costs the line of its bucket and its row.
#pragma once

#include <algorithm>
#include <cstring>

#include "cpu/index/probe_block.h"
#include "cpu/rows/args.h"

namespace dynemb::cpu {

// Number of ids at a stage. Lines and rows of all blocks stay in a first cache of 32 KiB; those of
// blocks of 64 leave it before they are read.
constexpr int64_t kFrozenBlock = 32;

// Ids go through five stages, a block at each: the line of the first bucket is fetched; then the
// row, or the line of the second bucket; then that row, or the line of the third bucket; then that
// row, or any later one; then rows are read.
constexpr int64_t kFrozenStages = 5;

struct FrozenBlock {
  int64_t begin;
  int64_t count;
  uint64_t hash[kFrozenBlock];
  int64_t bucket[kFrozenBlock];   // its line was fetched last
  int64_t stored[kFrozenBlock];   // in the first bucket; 0: the id is not there
  const char* row[kFrozenBlock];  // nullptr: missing, or not found yet
  int32_t later[kFrozenBlock];    // ids that may be in a later bucket
  int64_t later_count;
  bool complete;  // no id is missing
};

// Turns the stored handle of an id into the address of its row, and fetches the row.
struct RowFetch {
  const char* weights;
  int64_t row_bytes;
  int64_t rows;
  int64_t damaged = 0;  // negative: a handle named a row that does not exist

  explicit RowFetch(const TableRows& table)
      : weights(table.weights), row_bytes(table.row_bytes), rows(table.rows) {}

  // 0, of an id that was not found, counts as sound. Prefetching an invalid address is harmless.
  template <bool kOneLine>
  DYNEMB_INLINE const char* fetch(int64_t stored) {
    const int64_t number = handle_row(decode_handle(stored));
    damaged |= stored | (rows - 1 - number);
    const int64_t bytes = kOneLine ? 64 : row_bytes;
    const char* row = reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(weights) +
                                                    static_cast<uintptr_t>(number) *
                                                        static_cast<uintptr_t>(bytes));
    __builtin_prefetch(row);
    if constexpr (!kOneLine) {
      const int64_t fetched = std::min<int64_t>(bytes, 512);  // the rest follows
      for (int64_t byte = 64; byte < fetched; byte += 64) __builtin_prefetch(row + byte);
      // rows of partial cache lines may end in one more
      if (bytes % 64 != 0) __builtin_prefetch(row + fetched - 1);
    }
    return row;
  }
  template <bool kOneLine>
  DYNEMB_INLINE void fetch_all(FrozenBlock& block) {
    RowFetch copy = *this;  // so that stores below cannot change it
    for (int64_t i = 0; i < block.count; ++i) {
      block.row[i] = copy.template fetch<kOneLine>(block.stored[i]);
    }
    damaged = copy.damaged;
  }
  DYNEMB_INLINE void fetch_all(FrozenBlock& block) {
    row_bytes == 64 ? fetch_all<true>(block) : fetch_all<false>(block);
  }
};

// Fetches the rows of ids in their first bucket, and the second buckets of other ids. An id outside
// a first bucket that was never full is missing.
DYNEMB_INLINE void match_first_buckets(const TableView& index, const int64_t* ids,
                                       FrozenBlock& block, RowFetch& fetch) {
  static_assert(kFrozenBlock <= 64, "a bit of a word for each id of a block");
  uint64_t absent = 0;
  int64_t i = 0;
  for (; i + 4 <= block.count; i += 4) {
    const Words4 stored = match_four(index.lines, block.bucket + i, ids + i);
    std::memcpy(block.stored + i, &stored, sizeof stored);
    absent |= static_cast<uint64_t>(or_words((stored == 0) & Words4{1, 2, 4, 8})) << i;
  }
  for (; i < block.count; ++i) {
    block.stored[i] = match_stored(index.line(block.bucket[i]), ids[i]);
    absent |= static_cast<uint64_t>(block.stored[i] == 0) << i;
  }
  fetch.fetch_all(block);
  block.complete = true;
  block.later_count = 0;
  for (; absent != 0; absent &= absent - 1) {
    const int at = __builtin_ctzll(absent);
    const bool ends = has_empty_slot(index.line(block.bucket[at]));
    block.row[at] = nullptr;
    block.complete &= !ends;
    block.later[block.later_count] = at;
    block.later_count += !ends;
    block.bucket[at] = bucket_of(second_hash(block.hash[at]), index.bucket_count);
    prefetch_line(index.line(block.bucket[at]));
  }
}

// Fetches the rows of ids in the buckets that were fetched last, and the next buckets of others.
// Almost without branches, because hits are unpredictable.
DYNEMB_INLINE void match_next_buckets(const TableView& index, const int64_t* ids,
                                      FrozenBlock& block, RowFetch& fetch) {
  int64_t going_on = 0;
  for (int64_t l = 0; l < block.later_count; ++l) {
    const int32_t i = block.later[l];
    const int64_t bucket = block.bucket[i];
    const int64_t* line = index.line(bucket);
    const int64_t stored = match_stored(line, ids[i]);
    const char* row = fetch.fetch<false>(stored);
    block.row[i] = stored == 0 ? nullptr : row;
    const bool absent = stored == 0;
    const bool ends = absent & has_empty_slot(line);
    block.complete &= !ends;
    block.later[going_on] = i;
    going_on += absent & !ends;
    block.bucket[i] = bucket + 1 < index.bucket_count ? bucket + 1 : 0;
    prefetch_line(index.line(block.bucket[i]));
  }
  block.later_count = going_on;
}

// Searches one by one for the few ids with only full buckets so far: `probes` of them.
DYNEMB_INLINE void match_rest(const TableView& index, const int64_t* ids, int64_t probes,
                              FrozenBlock& block, RowFetch& fetch) {
  for (int64_t l = 0; l < block.later_count; ++l) {
    const int64_t i = block.later[l];
    const SlotPosition position = probe(index, ids[i], block.hash[i], probes);
    if (position.bucket < 0) {
      block.complete = false;
      continue;
    }
    const int64_t* line = index.line(position.bucket);
    block.row[i] = fetch.fetch<false>(line[kBucketWidth + position.slot]);
  }
}

// Reads `count` ids, in order: sink.take(first, row, count, complete) gets the rows of some ids,
// nullptr for missing ones, and whether none is missing. Returns the first of some ids of which one
// has an invalid row, and which the sink has not received; -1: none.
template <class Sink>
DYNEMB_INLINE int64_t read_frozen(const TableView& index, const TableRows& rows, const int64_t* ids,
                                  int64_t count, Sink& sink) {
  constexpr int64_t kLast = kFrozenStages - 1;
  FrozenBlock blocks[kFrozenStages];
  RowFetch fetch(rows);
  const int64_t total = (count + kFrozenBlock - 1) / kFrozenBlock;
  const auto block_at = [&](int64_t b) -> FrozenBlock& { return blocks[b % kFrozenStages]; };
  for (int64_t b = 0; b < total + kLast; ++b) {
    if (b < total) {
      FrozenBlock& block = block_at(b);
      block.begin = b * kFrozenBlock;
      block.count = std::min(kFrozenBlock, count - block.begin);
      fetch_lines(index, ids + block.begin, block.count, block.hash, block.bucket);
    }
    if (b >= 1 && b - 1 < total) {
      FrozenBlock& block = block_at(b - 1);
      match_first_buckets(index, ids + block.begin, block, fetch);
    }
    if (b >= 2 && b - 2 < total) {
      FrozenBlock& block = block_at(b - 2);
      match_next_buckets(index, ids + block.begin, block, fetch);
    }
    if (b >= 3 && b - 3 < total) {
      FrozenBlock& block = block_at(b - 3);
      match_next_buckets(index, ids + block.begin, block, fetch);
      match_rest(index, ids + block.begin, 3, block, fetch);
    }
    if (fetch.damaged < 0) return std::max<int64_t>(b - kLast, 0) * kFrozenBlock;
    if (b < kLast) continue;
    const FrozenBlock& block = block_at(b - kLast);
    sink.take(block.begin, block.row, block.count, block.complete);
  }
  return -1;
}

}  // namespace dynemb::cpu
