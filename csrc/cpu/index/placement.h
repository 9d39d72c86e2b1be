// Placement of entries that are known to be absent: the rounds that make the index deterministic.
#pragma once

#include <cstdint>
#include <vector>

#include "core/policy/decisions.h"
#include "cpu/index/probe.h"

namespace dynemb::cpu {

// An id to be placed. `order`: position in the sequence of placement; orders are distinct.
struct Entry {
  uint64_t hash;
  int64_t key;
  int64_t stored;
  int32_t table;
  int32_t order;
  int64_t score[kMaxScoreWords];
};

// Entries in the order of their placement. Pointers, because an entry is larger than a line.
using EntryList = std::vector<const Entry*>;

// The entries of all lists in ascending order; orders are distinct and less than `orders`.
EntryList merge_by_order(const std::vector<std::vector<Entry>>& lists, int64_t orders);

// The entries in memory order.
EntryList entry_list(const std::vector<Entry>& entries);

// Puts the entry into the bucket's first free slot, empty or tombstone, and counts the latter;
// false if the bucket is full. `memory`: the counters of the index.
inline bool put_entry(const void* memory, const TableView& table, int64_t bucket,
                      const Entry& entry, int64_t* reused_tombstones) {
  int64_t* line = table.line(bucket);
  uint32_t free = 0;  // a bit for each slot
  for (int slot = 0; slot < kBucketWidth; ++slot) {
    free |= static_cast<uint32_t>(line[kBucketWidth + slot] == 0) << slot;
  }
  if (free == 0) return false;
  const int slot = __builtin_ctz(free);
  *reused_tombstones += line[slot] != 0;
  fill_slot(memory, line, slot, entry.key, entry.stored);
  if (table.scores != nullptr) {
    int64_t* score = table.score(bucket, slot);
    for (int64_t w = 0; w < table.score_words; ++w) score[w * kBucketWidth] = entry.score[w];
  }
  return true;
}

// Puts every entry into a free slot of its table: first candidate buckets, then second candidates
// for the rest, then the buckets after them. Within a round a bucket takes its entries in the order
// given, so the result does not depend on the number of threads. Keys must be distinct, absent, and
// few enough to fit. Orders are not read.
void place_entries(const IndexArgs& index, const EntryList& entries);

// The same for entries with full first candidate buckets: the rounds after the first.
void place_displaced(const IndexArgs& index, const EntryList& entries);

}  // namespace dynemb::cpu
