#include "cpu/index/placement.h"

#include <algorithm>

#include "cpu/gradient/radix_sort.h"
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

// A thread's part of a round: the entries with buckets in its range of every table's buckets.
struct PlacementPart {
  const void* memory;  // counters of the index
  const std::vector<TableView>& tables;
  const EntryList& entries;
  int64_t part;
  int64_t parts;
  int64_t* reused;  // tombstones that entries have taken, by table
  uint8_t* left;    // by position: 1 for an entry without a place
};

// `hash_of` gives the hash with the address of the round's bucket in its high bits.
template <class HashOf>
void place_part(const PlacementPart& job, const HashOf& hash_of) {
  constexpr int64_t kPickedTogether = 1024;
  const auto count = static_cast<int64_t>(job.entries.size());
  std::vector<int64_t> begin, end;
  for (const TableView& table : job.tables) {
    begin.push_back(table.bucket_count * job.part / job.parts);
    end.push_back(table.bucket_count * (job.part + 1) / job.parts);
  }
  int64_t position[kPickedTogether];
  int64_t bucket[kPickedTogether];
  for (int64_t first = 0; first < count; first += kPickedTogether) {
    const int64_t last = std::min(count, first + kPickedTogether);
    int64_t picked = 0;
    for (int64_t i = first; i < last; ++i) {
      const Entry& entry = *job.entries[i];
      position[picked] = i;
      bucket[picked] = bucket_of(hash_of(entry), job.tables[entry.table].bucket_count);
      picked += bucket[picked] >= begin[entry.table] && bucket[picked] < end[entry.table];
    }
    for (int64_t k = 0; k < picked; ++k) {
      if (k + kLookahead < picked) {
        const TableView& table = job.tables[job.entries[position[k + kLookahead]]->table];
        prefetch_line(table.line(bucket[k + kLookahead]));
      }
      const Entry& entry = *job.entries[position[k]];
      job.left[position[k]] = !put_entry(job.memory, job.tables[entry.table], bucket[k], entry,
                                         &job.reused[entry.table]);
    }
  }
}

// Runs one round over the entries and returns those without a place, in order. Each thread goes
// over all entries: selecting those of its buckets takes much less than placing them.
template <class HashOf>
EntryList place_round(const void* memory, const std::vector<TableView>& tables, int64_t* reused,
                      const EntryList& entries, const HashOf& hash_of) {
  const auto count = static_cast<int64_t>(entries.size());
  const auto table_count = static_cast<int64_t>(tables.size());
  const int64_t parts = count < kParallelWork ? 1 : torch::stable::get_num_threads();
  std::vector<uint8_t> left(count, 0);
  std::vector<int64_t> reused_by(parts * table_count, 0);
  parallel_units(parts, count, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      place_part(
          {memory, tables, entries, part, parts, &reused_by[part * table_count], left.data()},
          hash_of);
    }
  });
  for (int64_t part = 0; part < parts; ++part) {
    for (int64_t t = 0; t < table_count; ++t) reused[t] += reused_by[part * table_count + t];
  }
  EntryList rest;
  for (int64_t i = 0; i < count; ++i) {
    if (left[i] != 0) rest.push_back(entries[i]);
  }
  return rest;
}

}  // namespace

EntryList merge_by_order(const std::vector<std::vector<Entry>>& lists, int64_t orders) {
  constexpr int kNumberBits = 32;
  EntryList entries;
  Scratch<uint64_t> items;  // orders and numbers in `entries`
  for (const auto& list : lists) {
    for (const Entry& entry : list) {
      items.push_back(static_cast<uint64_t>(entry.order) << kNumberBits | entries.size());
      entries.push_back(&entry);
    }
  }
  const int order_bits = 64 - __builtin_clzll(static_cast<uint64_t>(orders));
  radix_sort(items, kNumberBits, kNumberBits + order_bits);
  EntryList merged(entries.size());
  for (size_t i = 0; i < merged.size(); ++i) merged[i] = entries[items[i] & UINT32_MAX];
  return merged;
}

EntryList entry_list(const std::vector<Entry>& entries) {
  EntryList list;
  list.reserve(entries.size());
  for (const Entry& entry : entries) list.push_back(&entry);
  return list;
}

void place_entries(const IndexArgs& index, const EntryList& entries) {
  std::vector<int64_t> reused(index.table_count, 0);
  const EntryList rest = place_round(index.tables, table_views(index), reused.data(), entries,
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
  const EntryList rest = place_round(index.tables, tables, reused.data(), entries,
                                     [](const Entry& e) { return second_hash(e.hash); });
  for (size_t i = 0; i < rest.size(); ++i) {
    if (i + 2 * kLookahead < rest.size()) __builtin_prefetch(rest[i + 2 * kLookahead]);
    if (i + kLookahead < rest.size()) {
      const Entry& ahead = *rest[i + kLookahead];
      const TableView& table = tables[ahead.table];
      const ProbeSequence sequence(ahead.hash, table.bucket_count);
      prefetch_line(table.line(sequence.at(2)));
      prefetch_line(table.line(sequence.at(3)));
    }
    const Entry& entry = *rest[i];
    const TableView& table = tables[entry.table];
    const ProbeSequence sequence(entry.hash, table.bucket_count);
    int64_t probe = 2;
    while (probe < sequence.length() &&
           !put_entry(index.tables, table, sequence.at(probe), entry, &reused[entry.table])) {
      ++probe;
    }
  }
  for (int64_t t = 0; t < index.table_count; ++t) {
    index.table_row(t)[kTableTombstones] -= reused[t];
  }
}

}  // namespace dynemb::cpu
