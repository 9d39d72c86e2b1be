#include "cpu/index/placement.h"

#include <algorithm>

#include "cpu/index/probe.h"

namespace dynemb::cpu {
namespace {

constexpr int64_t kLookahead = 16;

std::vector<TableView> table_views(const IndexArgs& index) {
  std::vector<TableView> tables;
  tables.reserve(index.table_count);
  for (int64_t t = 0; t < index.table_count; ++t) tables.push_back(index.table(t));
  return tables;
}

// Runs one round over the entries and returns those that found no place, in order. `hash_of` gives
// the hash whose high bits address the round's bucket.
template <class HashOf>
EntryList place_round(const std::vector<TableView>& tables, int64_t* reused,
                      const EntryList& entries, const HashOf& hash_of) {
  const int64_t count = static_cast<int64_t>(entries.size());
  const auto bucket_for = [&](const Entry& entry) {
    return bucket_of(hash_of(entry), tables[entry.table].bucket_count);
  };
  EntryList rest;
  if (count < kParallelWork || torch::stable::get_num_threads() == 1) {
    for (int64_t i = 0; i < count; ++i) {
      if (i + kLookahead < count) {
        const Entry& ahead = *entries[i + kLookahead];
        prefetch_line(tables[ahead.table].line(bucket_for(ahead)));
      }
      const Entry& entry = *entries[i];
      if (!put_entry(tables[entry.table], bucket_for(entry), entry, &reused[entry.table])) {
        rest.push_back(&entry);
      }
    }
    return rest;
  }
  // A partition is a range of the hash, hence a range of buckets, in tables whose bucket count
  // allows it, and a whole table otherwise: no bucket belongs to two partitions.
  const auto partition_of = [&](const Entry& entry) -> int64_t {
    return tables[entry.table].bucket_count % kPartitions == 0
               ? static_cast<int64_t>(hash_of(entry) >> 58)
               : entry.table % kPartitions;
  };
  std::vector<int64_t> begin(kPartitions + 1, 0);
  for (const Entry* entry : entries) ++begin[partition_of(*entry) + 1];
  for (int64_t p = 0; p < kPartitions; ++p) begin[p + 1] += begin[p];
  std::vector<int32_t> sorted(count);  // positions in `entries`
  std::vector<int64_t> next(begin.begin(), begin.end() - 1);
  for (int64_t i = 0; i < count; ++i) {
    sorted[next[partition_of(*entries[i])]++] = static_cast<int32_t>(i);
  }
  const int64_t table_count = static_cast<int64_t>(tables.size());
  std::vector<uint8_t> left(count, 0);  // by position: the entry has found no place
  std::vector<int64_t> reused_by(kPartitions * table_count, 0);
  parallel_units(kPartitions, count, [&](int64_t part_begin, int64_t part_end) {
    for (int64_t p = part_begin; p < part_end; ++p) {
      for (int64_t i = begin[p]; i < begin[p + 1]; ++i) {
        if (i + 2 * kLookahead < begin[p + 1]) {
          __builtin_prefetch(entries[sorted[i + 2 * kLookahead]]);
        }
        if (i + kLookahead < begin[p + 1]) {
          const Entry& ahead = *entries[sorted[i + kLookahead]];
          prefetch_line(tables[ahead.table].line(bucket_for(ahead)));
        }
        const Entry& entry = *entries[sorted[i]];
        if (!put_entry(tables[entry.table], bucket_for(entry), entry,
                       &reused_by[p * table_count + entry.table])) {
          left[sorted[i]] = 1;
        }
      }
    }
  });
  for (int64_t p = 0; p < kPartitions; ++p) {
    for (int64_t t = 0; t < table_count; ++t) reused[t] += reused_by[p * table_count + t];
  }
  for (int64_t i = 0; i < count; ++i) {
    if (left[i] != 0) rest.push_back(entries[i]);
  }
  return rest;
}

}  // namespace

EntryList merge_by_order(const std::vector<std::vector<Entry>>& lists, int64_t orders) {
  EntryList merged(orders, nullptr);
  for (const auto& list : lists) {
    for (const Entry& entry : list) merged[entry.order] = &entry;
  }
  merged.erase(std::remove(merged.begin(), merged.end(), nullptr), merged.end());
  return merged;
}

EntryList entry_list(const std::vector<Entry>& entries) {
  EntryList list;
  list.reserve(entries.size());
  for (const Entry& entry : entries) list.push_back(&entry);
  return list;
}

bool put_entry(const TableView& table, int64_t bucket, const Entry& entry,
               int64_t* reused_tombstones) {
  int64_t* line = table.line(bucket);
  for (int slot = 0; slot < kBucketWidth; ++slot) {
    if (line[kBucketWidth + slot] != 0) continue;
    if (line[slot] != 0) ++*reused_tombstones;
    line[slot] = entry.key;
    line[kBucketWidth + slot] = entry.stored;
    if (table.scores != nullptr) {
      int64_t* score = table.score(bucket, slot);
      for (int64_t w = 0; w < table.score_words; ++w) score[w * kBucketWidth] = entry.score[w];
    }
    return true;
  }
  return false;
}

void place_entries(const IndexArgs& index, const EntryList& entries) {
  std::vector<int64_t> reused(index.table_count, 0);
  const EntryList rest = place_round(table_views(index), reused.data(), entries,
                                     [](const Entry& e) { return e.hash; });
  for (int64_t t = 0; t < index.table_count; ++t) {
    index.table_row(t)[kTableTombstones] -= reused[t];
  }
  place_displaced(index, rest);
}

void place_displaced(const IndexArgs& index, const EntryList& entries) {
  if (entries.empty()) return;
  const std::vector<TableView> tables = table_views(index);
  std::vector<int64_t> reused(index.table_count, 0);
  const EntryList rest = place_round(tables, reused.data(), entries,
                                     [](const Entry& e) { return second_hash(e.hash); });
  for (size_t i = 0; i < rest.size(); ++i) {
    if (i + kLookahead < rest.size()) {
      const Entry& ahead = *rest[i + kLookahead];
      const TableView& table = tables[ahead.table];
      prefetch_line(table.line(ProbeSequence(ahead.hash, table.bucket_count).at(2)));
    }
    const Entry& entry = *rest[i];
    const TableView& table = tables[entry.table];
    const ProbeSequence sequence(entry.hash, table.bucket_count);
    int64_t probe = 2;
    while (probe < sequence.length() &&
           !put_entry(table, sequence.at(probe), entry, &reused[entry.table])) {
      ++probe;
    }
  }
  for (int64_t t = 0; t < index.table_count; ++t) {
    index.table_row(t)[kTableTombstones] -= reused[t];
  }
}

}  // namespace dynemb::cpu
