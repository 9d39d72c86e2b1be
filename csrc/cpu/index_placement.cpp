#include "cpu/index_placement.h"

#include <algorithm>

#include "cpu/index_probe.h"

namespace dynemb::cpu {
namespace {

constexpr int64_t kLookahead = 16;

// Runs one round over the entries and returns those that found no place, in order. `hash_of` gives
// the hash whose high bits address the round's bucket.
template <class HashOf>
std::vector<Entry> place_round(const std::vector<TableView>& tables, int64_t* reused,
                               const std::vector<Entry>& entries, const HashOf& hash_of) {
  const int64_t count = static_cast<int64_t>(entries.size());
  std::vector<Entry> rest;
  if (count < kParallelWork) {
    for (const Entry& entry : entries) {
      const TableView& table = tables[entry.table];
      if (!put_entry(table, bucket_of(hash_of(entry), table.bucket_count), entry,
                     &reused[entry.table])) {
        rest.push_back(entry);
      }
    }
    return rest;
  }
  // A partition is a range of the hash, hence a range of buckets, in tables whose bucket count
  // allows it, and a whole table otherwise: no bucket belongs to two partitions.
  const Partitioned parts = partition_items(count, [&](int64_t i) -> int64_t {
    const Entry& entry = entries[i];
    return tables[entry.table].bucket_count % kPartitions == 0
               ? static_cast<int64_t>(hash_of(entry) >> 58)
               : entry.table % kPartitions;
  });
  const int64_t table_count = static_cast<int64_t>(tables.size());
  std::vector<uint8_t> placed(count, 0);
  std::vector<int64_t> reused_by(kPartitions * table_count, 0);
  parallel_units(kPartitions, count, [&](int64_t part_begin, int64_t part_end) {
    for (int64_t p = part_begin; p < part_end; ++p) {
      const int64_t end = parts.begin[p + 1];
      for (int64_t i = parts.begin[p]; i < end; ++i) {
        if (i + 2 * kLookahead < end) {
          __builtin_prefetch(&entries[parts.item[i + 2 * kLookahead]]);
        }
        if (i + kLookahead < end) {
          const Entry& ahead = entries[parts.item[i + kLookahead]];
          const TableView& table = tables[ahead.table];
          prefetch_line(table.line(bucket_of(hash_of(ahead), table.bucket_count)));
        }
        const Entry& entry = entries[parts.item[i]];
        const TableView& table = tables[entry.table];
        placed[parts.item[i]] = put_entry(table, bucket_of(hash_of(entry), table.bucket_count),
                                          entry, &reused_by[p * table_count + entry.table]);
      }
    }
  });
  for (int64_t p = 0; p < kPartitions; ++p) {
    for (int64_t t = 0; t < table_count; ++t) reused[t] += reused_by[p * table_count + t];
  }
  for (int64_t i = 0; i < count; ++i) {
    if (placed[i] == 0) rest.push_back(entries[i]);
  }
  return rest;
}

}  // namespace

bool put_entry(const TableView& table, int64_t bucket, const Entry& entry,
               int64_t* reused_tombstones) {
  int64_t* line = table.line(bucket);
  for (int slot = 0; slot < kBucketWidth; ++slot) {
    if (line[kBucketWidth + slot] != 0) continue;
    if (line[slot] != 0) ++*reused_tombstones;
    line[slot] = entry.key;
    line[kBucketWidth + slot] = entry.stored;
    if (table.scores != nullptr) table.scores[bucket * kBucketWidth + slot] = entry.score;
    return true;
  }
  return false;
}

void place_entries(const IndexView& index, std::vector<Entry> entries) {
  std::vector<TableView> tables;
  tables.reserve(index.table_count);
  for (int64_t t = 0; t < index.table_count; ++t) tables.push_back(index.table(t));
  std::vector<int64_t> reused(index.table_count, 0);
  entries = place_round(tables, reused.data(), entries, [](const Entry& e) { return e.hash; });
  entries = place_round(tables, reused.data(), entries,
                        [](const Entry& e) { return second_hash(e.hash); });
  for (const Entry& entry : entries) {
    const TableView& table = tables[entry.table];
    const ProbeSequence sequence(entry.hash, table.bucket_count);
    int64_t i = 2;
    while (i < sequence.length() &&
           !put_entry(table, sequence.at(i), entry, &reused[entry.table])) {
      ++i;
    }
  }
  for (int64_t t = 0; t < index.table_count; ++t) {
    index.table_row(t)[kTableTombstones] -= reused[t];
  }
}

}  // namespace dynemb::cpu
