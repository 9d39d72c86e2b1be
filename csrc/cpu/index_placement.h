// Placement of entries that are known to be absent: the rounds that make the index deterministic.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/index_view.h"

namespace dynemb::cpu {

struct Entry {
  uint64_t hash;
  int64_t key;
  int64_t stored;
  int64_t score;
  int64_t table;
};

// Puts the entry into the bucket's first free slot, empty or tombstone, and counts the latter;
// false if there is none.
bool put_entry(const TableView& table, int64_t bucket, const Entry& entry,
               int64_t* reused_tombstones);

// Puts every entry into a free slot of its table: first candidate buckets, then second candidates
// for the rest, then the buckets after them. Within a round a bucket takes its entries in the order
// given, so the result does not depend on the number of threads. Keys must be distinct, absent, and
// few enough to fit.
void place_entries(const IndexView& index, std::vector<Entry> entries);

// Stable distribution of `count` items over kPartitions by their partition number.
struct Partitioned {
  std::vector<int64_t> begin;  // kPartitions + 1
  std::vector<int32_t> item;   // item numbers, ascending within a partition
};
template <class PartitionOf>
Partitioned partition_items(int64_t count, const PartitionOf& partition_of) {
  Partitioned result;
  std::vector<uint8_t> partition(count);
  result.begin.assign(kPartitions + 1, 0);
  for (int64_t i = 0; i < count; ++i) {
    partition[i] = static_cast<uint8_t>(partition_of(i));
    ++result.begin[partition[i] + 1];
  }
  for (int64_t p = 0; p < kPartitions; ++p) result.begin[p + 1] += result.begin[p];
  std::vector<int64_t> next(result.begin.begin(), result.begin.end() - 1);
  result.item.resize(count);
  for (int64_t i = 0; i < count; ++i) {
    result.item[next[partition[i]]++] = static_cast<int32_t>(i);
  }
  return result;
}

}  // namespace dynemb::cpu
