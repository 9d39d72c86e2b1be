// find_or_insert_: finds all ids, then gives rows to the new ones, in the rounds that keep every
// integer of the state independent of the number of threads.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <vector>

#include "cpu/index_find.h"
#include "cpu/index_growth.h"
#include "cpu/index_placement.h"
#include "cpu/index_view.h"
#include "cpu/memory.h"

namespace dynemb::cpu {
namespace {

struct Misses {
  std::vector<int64_t> position;  // in ids, ascending: order of occurrence
  std::vector<Entry> entry;
};

// Round 1: handles of the ids that are there; scores of their slots are updated.
Misses find_all(const IndexView& index, const FeatureIds& features, int64_t score,
                int64_t* handles) {
  const std::vector<Tile> tiles = make_tiles(features);
  const int64_t tile_count = static_cast<int64_t>(tiles.size());
  std::vector<int32_t> missing(features.count);
  std::vector<int64_t> missing_begin(tile_count + 1, 0);
  parallel_units(tile_count, features.count, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Tile& tile = tiles[i];
      find_tile({index.table(tile.table), features.ids + tile.begin, tile.end - tile.begin,
                 handles + tile.begin, missing.data() + tile.begin, &missing_begin[i + 1], score});
    }
  });
  for (int64_t i = 0; i < tile_count; ++i) missing_begin[i + 1] += missing_begin[i];
  const int64_t count = missing_begin[tile_count];
  Misses misses;
  misses.position.resize(count);
  misses.entry.resize(count);
  parallel_units(tile_count, count, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Tile& tile = tiles[i];
      const uint64_t salt = bucket_salt(index.meta_row(tile.table)[kMetaSeed]);
      for (int64_t m = missing_begin[i]; m < missing_begin[i + 1]; ++m) {
        const int64_t position = tile.begin + missing[tile.begin + m - missing_begin[i]];
        const int64_t id = features.ids[position];
        misses.position[m] = position;
        misses.entry[m] = {first_hash(id, salt), id, 0, score, tile.table};
      }
    }
  });
  return misses;
}

// Round 2: for each miss, the first miss with the same table and id.
std::vector<int32_t> first_occurrences(const std::vector<Entry>& entries) {
  const int64_t count = static_cast<int64_t>(entries.size());
  std::vector<int32_t> first(count);
  // Partitions keep the dedupe table in cache; few misses make one partition.
  const bool single = count < kParallelWork;
  const Partitioned parts = partition_items(
      count, [&](int64_t i) { return single ? 0 : static_cast<int64_t>(entries[i].hash >> 58); });
  parallel_units(kPartitions, count, [&](int64_t part_begin, int64_t part_end) {
    std::vector<int32_t> slots;
    for (int64_t p = part_begin; p < part_end; ++p) {
      const int64_t items = parts.begin[p + 1] - parts.begin[p];
      if (items == 0) continue;
      uint64_t size = 16;
      while (size < 2 * static_cast<uint64_t>(items)) size *= 2;
      slots.assign(size, -1);
      for (int64_t k = parts.begin[p]; k < parts.begin[p + 1]; ++k) {
        const int32_t i = parts.item[k];
        const Entry& entry = entries[i];
        uint64_t slot = (entry.hash + static_cast<uint64_t>(entry.table)) & (size - 1);
        while (slots[slot] >= 0 && (entries[slots[slot]].key != entry.key ||
                                    entries[slots[slot]].table != entry.table)) {
          slot = (slot + 1) & (size - 1);
        }
        if (slots[slot] < 0) slots[slot] = i;
        first[i] = slots[slot];
      }
    }
  });
  return first;
}

// Hands out the rows of the group's slabs.
class RowAllocator {
 public:
  RowAllocator(const IndexView& index, const Tensor& slabs, const Tensor& free_rows)
      : index_(index) {
    check_tensor(index.op, "slabs", slabs, ScalarType::Long);
    check_size(index.op, "slabs", slabs, 1, kSlabColumns);
    check_tensor(index.op, "free_rows", free_rows, ScalarType::Long);
    check_size(index.op, "free_rows", free_rows, 0, slabs.size(0));
    slabs_ = static_cast<int64_t*>(slabs.data_ptr());
    slab_count_ = slabs.size(0);
    free_rows_ = static_cast<int64_t*>(free_rows.data_ptr());
    max_rows_ = free_rows.size(1);
  }

  int64_t* slab(int64_t s) const { return slabs_ + s * kSlabColumns; }

  // Raises if `rows[s]` more rows of slab s cannot be had. Changes nothing.
  void check(const std::vector<int64_t>& rows) const {
    for (int64_t s = 0; s < slab_count_; ++s) {
      const int64_t fresh = rows[s] - slab(s)[kSlabFreeCount];
      if (fresh <= 0) continue;
      const int64_t needed = slab(s)[kSlabNextRow] + fresh;
      STD_TORCH_CHECK(needed <= max_rows_, "dynemb::", index_.op, ": row slab ", s, " needs ",
                      needed, " rows but has room for ", max_rows_,
                      ": create the table with a larger max_rows, or erase ids");
      if (needed <= slab(s)[kSlabCommittedRows]) continue;
      const int64_t bytes =
          (commit_target(s, needed) - slab(s)[kSlabCommittedRows]) * slab(s)[kSlabRowBytes];
      if (bytes < kCheckedBytes) continue;
      const int64_t available = available_memory();
      const int64_t least = fresh * slab(s)[kSlabRowBytes];
      STD_TORCH_CHECK(least <= available, "dynemb::", index_.op, ": ", fresh, " new rows take ",
                      least >> 20, " MiB, but only ", available >> 20,
                      " MiB of memory are available; nothing was changed. Erase ids or use a "
                      "machine with more memory");
    }
  }

  // The next row's handle: freed rows first, last freed first.
  int64_t take(int64_t s) {
    int64_t* row = slab(s);
    if (row[kSlabFreeCount] > 0) return free_rows_[s * max_rows_ + --row[kSlabFreeCount]];
    const int64_t next = row[kSlabNextRow]++;
    if (next >= row[kSlabCommittedRows]) row[kSlabCommittedRows] = commit_target(s, next + 1);
    return make_handle(next, kFirstGeneration);
  }

 private:
  static constexpr int64_t kCheckedBytes = int64_t{64} << 20;

  // Memory is looked at in steps of 64 MiB and an eighth of what is in use.
  int64_t commit_target(int64_t s, int64_t needed) const {
    const int64_t row_bytes = std::max<int64_t>(slab(s)[kSlabRowBytes], 1);
    return std::min(max_rows_, needed + needed / 8 + kCheckedBytes / row_bytes);
  }

  const IndexView& index_;
  int64_t* slabs_;
  int64_t slab_count_;
  int64_t* free_rows_;
  int64_t max_rows_;
};

Tensor find_or_insert_(Tensor buckets, Tensor scores, Tensor tables, Tensor slabs, Tensor free_rows,
                       Tensor meta, Tensor clock, Tensor ids, Tensor offsets,
                       std::vector<int64_t> feature_tables) {
  const char* op = "find_or_insert_";
  const IndexView index = index_view(op, buckets, &scores, tables, meta);
  check_tensor(op, "clock", clock, ScalarType::Long);
  RowAllocator allocator(index, slabs, free_rows);
  const FeatureIds features = feature_ids(op, ids, offsets, feature_tables, index.table_count);
  for (int64_t t = 0; t < index.table_count; ++t) {
    const int64_t slab = index.meta_row(t)[kMetaSlab];
    STD_TORCH_CHECK(slab >= 0 && slab < slabs.size(0), "dynemb::", op, ": meta of table ", t,
                    " names slab ", slab, ", expected 0 to ", slabs.size(0) - 1);
  }
  STD_TORCH_CHECK(features.count < (int64_t{1} << 31), "dynemb::", op, ": ids has ", features.count,
                  " elements, expected fewer than 2^31: split the batch");
  const int64_t score = *static_cast<const int64_t*>(clock.data_ptr());
  Tensor handles = empty_cpu({features.count}, ScalarType::Long);
  auto* handle = static_cast<int64_t*>(handles.data_ptr());
  Misses misses = find_all(index, features, score, handle);
  if (misses.position.empty()) return handles;

  const std::vector<int32_t> first = first_occurrences(misses.entry);
  std::vector<int64_t> new_ids(index.table_count, 0);
  std::vector<int64_t> new_rows(slabs.size(0), 0);
  const int64_t count = static_cast<int64_t>(first.size());
  for (int64_t m = 0; m < count; ++m) {
    if (first[m] == m) ++new_ids[misses.entry[m].table];
  }
  std::vector<GrowthDecision> growth(index.table_count);
  for (int64_t t = 0; t < index.table_count; ++t) {
    const int64_t* row = index.table_row(t);
    new_rows[index.meta_row(t)[kMetaSlab]] += new_ids[t];
    growth[t] = decide_growth(row[kTableBucketCount], index.meta_row(t)[kMetaRegionBuckets],
                              row[kTableSize], row[kTableTombstones], new_ids[t]);
    if (growth[t].rehash) check_rehash(index, t, growth[t].bucket_count);
  }
  allocator.check(new_rows);  // nothing has been changed up to here but scores of ids found

  std::vector<Entry> entries;
  for (int64_t m = 0; m < count; ++m) {
    if (first[m] != m) continue;
    Entry& entry = misses.entry[m];
    entry.stored = encode_handle(allocator.take(index.meta_row(entry.table)[kMetaSlab]));
    entries.push_back(entry);
  }
  for (int64_t t = 0; t < index.table_count; ++t) {
    if (growth[t].rehash) rehash(index, t, growth[t].bucket_count);
    index.table_row(t)[kTableSize] += new_ids[t];
    index.table_row(t)[kTableInserted] += new_ids[t];
  }
  place_entries(index, std::move(entries));
  for (int64_t m = 0; m < count; ++m) {
    handle[misses.position[m]] = decode_handle(misses.entry[first[m]].stored);
  }
  return handles;
}

}  // namespace
}  // namespace dynemb::cpu

STABLE_TORCH_LIBRARY_IMPL(dynemb, CPU, m) {
  m.impl("find_or_insert_", TORCH_BOX(&dynemb::cpu::find_or_insert_));
}
