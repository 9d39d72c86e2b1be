// find_or_insert_: finds all ids, then gives rows to the new ones, in the rounds that keep every
// integer of the state independent of the number of threads.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <vector>

#include "core/row_allocation.h"
#include "cpu/index_find.h"
#include "cpu/index_growth.h"
#include "cpu/index_placement.h"
#include "cpu/index_probe.h"
#include "cpu/index_view.h"
#include "cpu/memory.h"

namespace dynemb::cpu {
namespace {

// An id that round 1 did not find. `order` counts the misses in order of occurrence.
struct Miss {
  int64_t id;
  int32_t order;
  int32_t table;  // from round 2 on: ~table for all but the first miss of a table and id
};

// All misses of a call, by partition of the hash: a partition's dedupe table and its buckets stay
// in cache. Within a partition the order of occurrence is kept.
struct Misses {
  std::vector<Tile> tiles;
  std::vector<int64_t> tile_begin;  // order of each tile's first miss, and their number at the end
  std::vector<int32_t> in_tile;     // positions of misses within their tile, from tile.begin on
  std::vector<Miss> items;
  std::vector<int64_t> begin;   // first item of each partition
  std::vector<int32_t> first;   // by order: order of the first miss of the same table and id
  std::vector<int64_t> handle;  // by order, of first misses

  int64_t count() const { return tile_begin.back(); }
};

struct ReleaseLarge {
  static constexpr size_t kKeptIds = size_t{1} << 21;
  Misses* misses;

  explicit ReleaseLarge(Misses* target) : misses(target) {}
  ~ReleaseLarge() {
    if (misses->in_tile.capacity() > kKeptIds) *misses = Misses{};
  }
};

// Round 1: handles of the ids that are there; scores of their slots are updated.
void find_all(const IndexView& index, const FeatureIds& features, int64_t score, int64_t* handles,
              Misses* misses) {
  misses->tiles = make_tiles(features);
  const std::vector<Tile>& tiles = misses->tiles;
  const int64_t tile_count = static_cast<int64_t>(tiles.size());
  misses->tile_begin.assign(tile_count + 1, 0);
  misses->in_tile.resize(features.count);
  parallel_units(tile_count, features.count, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Tile& tile = tiles[i];
      find_tile({index.table(tile.table), features.ids + tile.begin, tile.end - tile.begin,
                 handles + tile.begin, misses->in_tile.data() + tile.begin,
                 &misses->tile_begin[i + 1], score});
    }
  });
  for (int64_t i = 0; i < tile_count; ++i) misses->tile_begin[i + 1] += misses->tile_begin[i];
}

// Few misses make one partition.
int64_t partition_of(const Misses& misses, uint64_t hash) {
  return misses.count() < kParallelWork ? 0 : static_cast<int64_t>(hash >> 58);
}

void partition_misses(const IndexView& index, const FeatureIds& features, Misses* misses) {
  const std::vector<Tile>& tiles = misses->tiles;
  const int64_t tile_count = static_cast<int64_t>(tiles.size());
  constexpr int64_t kMaxChunks = 16;
  const int64_t chunks = std::min(kMaxChunks, tile_count);
  std::vector<int64_t> next(chunks * kPartitions, 0);
  const auto for_each_miss = [&](int64_t chunk, const auto& visit) {
    for (int64_t i = tile_count * chunk / chunks; i < tile_count * (chunk + 1) / chunks; ++i) {
      const Tile& tile = tiles[i];
      const uint64_t salt = bucket_salt(index.meta_row(tile.table)[kMetaSeed]);
      for (int64_t m = misses->tile_begin[i]; m < misses->tile_begin[i + 1]; ++m) {
        const int64_t position = misses->in_tile[tile.begin + m - misses->tile_begin[i]];
        const int64_t id = features.ids[tile.begin + position];
        const int64_t part = partition_of(*misses, first_hash(id, salt));
        visit(part, Miss{id, static_cast<int32_t>(m), static_cast<int32_t>(tile.table)});
      }
    }
  };
  parallel_units(chunks, misses->count(), [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      for_each_miss(c, [&](int64_t part, const Miss&) { ++next[c * kPartitions + part]; });
    }
  });
  misses->begin.assign(kPartitions + 1, 0);
  int64_t sum = 0;
  for (int64_t p = 0; p < kPartitions; ++p) {
    misses->begin[p] = sum;
    for (int64_t c = 0; c < chunks; ++c) {
      const int64_t n = next[c * kPartitions + p];
      next[c * kPartitions + p] = sum;
      sum += n;
    }
  }
  misses->begin[kPartitions] = sum;
  misses->items.resize(misses->count());
  parallel_units(chunks, misses->count(), [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      int64_t* position = next.data() + c * kPartitions;
      for_each_miss(
          c, [&](int64_t part, const Miss& miss) { misses->items[position[part]++] = miss; });
    }
  });
}

// Round 2: finds the first occurrence of every new id; returns the number of new ids by table.
std::vector<int64_t> dedupe_misses(int64_t table_count, Misses* misses) {
  misses->first.resize(misses->count());
  std::vector<int64_t> new_ids(kPartitions * table_count, 0);
  parallel_units(kPartitions, misses->count(), [&](int64_t part_begin, int64_t part_end) {
    std::vector<int32_t> slots;  // item numbers within the partition
    std::vector<int32_t> repeated;
    for (int64_t p = part_begin; p < part_end; ++p) {
      Miss* items = misses->items.data() + misses->begin[p];
      const int64_t count = misses->begin[p + 1] - misses->begin[p];
      if (count == 0) continue;
      repeated.clear();
      int bits = 4;
      while ((int64_t{1} << bits) < 2 * count) ++bits;
      slots.assign(size_t{1} << bits, -1);
      const uint64_t mask = (uint64_t{1} << bits) - 1;
      for (int64_t i = 0; i < count; ++i) {
        const Miss& miss = items[i];
        uint64_t slot = fmix64(static_cast<uint64_t>(miss.id) + static_cast<uint64_t>(miss.table));
        slot &= mask;
        while (slots[slot] >= 0 &&
               (items[slots[slot]].id != miss.id || items[slots[slot]].table != miss.table)) {
          slot = (slot + 1) & mask;
        }
        if (slots[slot] < 0) {
          slots[slot] = static_cast<int32_t>(i);
          ++new_ids[p * table_count + miss.table];
        } else {
          repeated.push_back(static_cast<int32_t>(i));
        }
        misses->first[miss.order] = items[slots[slot]].order;
      }
      for (const int32_t i : repeated) items[i].table = ~items[i].table;
    }
  });
  std::vector<int64_t> total(table_count, 0);
  for (int64_t p = 0; p < kPartitions; ++p) {
    for (int64_t t = 0; t < table_count; ++t) total[t] += new_ids[p * table_count + t];
  }
  return total;
}

// Round 3: every new id into its first bucket, partition by partition. A partition is a range of
// the hash, hence a range of buckets where the bucket count allows it. What finds no place there
// goes through the remaining rounds in order of occurrence.
void place_misses(const IndexView& index, int64_t score, const Misses& misses) {
  constexpr int64_t kLookahead = 16;
  std::vector<TableView> tables;
  for (int64_t t = 0; t < index.table_count; ++t) tables.push_back(index.table(t));
  std::vector<std::vector<Entry>> rest(kPartitions);
  std::vector<int64_t> reused(kPartitions * index.table_count, 0);
  const bool one_partition = misses.count() < kParallelWork;
  parallel_units(kPartitions, misses.count(), [&](int64_t part_begin, int64_t part_end) {
    for (int64_t p = part_begin; p < part_end; ++p) {
      const Miss* items = misses.items.data() + misses.begin[p];
      const int64_t count = misses.begin[p + 1] - misses.begin[p];
      for (int64_t i = 0; i < count; ++i) {
        if (i + kLookahead < count && items[i + kLookahead].table >= 0) {
          const Miss& ahead = items[i + kLookahead];
          const TableView& table = tables[ahead.table];
          __builtin_prefetch(&misses.handle[ahead.order]);
          prefetch_line(
              table.line(bucket_of(first_hash(ahead.id, table.salt), table.bucket_count)));
        }
        const Miss& miss = items[i];
        if (miss.table < 0) continue;
        const TableView& table = tables[miss.table];
        const Entry entry{first_hash(miss.id, table.salt),
                          miss.id,
                          encode_handle(misses.handle[miss.order]),
                          score,
                          miss.table,
                          miss.order};
        const bool owned = one_partition || table.bucket_count % kPartitions == 0;
        if (!owned || !put_entry(table, bucket_of(entry.hash, table.bucket_count), entry,
                                 &reused[p * index.table_count + miss.table])) {
          rest[p].push_back(entry);
        }
      }
    }
  });
  for (int64_t p = 0; p < kPartitions; ++p) {
    for (int64_t t = 0; t < index.table_count; ++t) {
      index.table_row(t)[kTableTombstones] -= reused[p * index.table_count + t];
    }
  }
  place_entries(index, merge_by_order(rest, misses.count()));
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

  // Bytes of memory to be had before `rows[s]` more rows of each slab s are given out, 0 while
  // enough has been checked before. Raises if there is no room for that many rows. Changes nothing.
  int64_t check(const std::vector<int64_t>& rows) const {
    int64_t bytes = 0;
    for (int64_t s = 0; s < slab_count_; ++s) {
      const int64_t fresh = std::max<int64_t>(rows[s] - slab(s)[kSlabFreeCount], 0);
      const int64_t needed = slab(s)[kSlabNextRow] + fresh;
      STD_TORCH_CHECK(needed <= max_rows_, "dynemb::", index_.op, ": row slab ", s, " needs ",
                      needed, " rows but has room for ", max_rows_,
                      ": create the table with a larger max_rows, or erase ids");
      if (needed > slab(s)[kSlabCommittedRows]) {
        bytes += (commit_target(needed, slab(s)[kSlabRowBytes], max_rows_) -
                  slab(s)[kSlabCommittedRows]) *
                 slab(s)[kSlabRowBytes];
      }
    }
    return bytes;
  }

  // The next row's handle: freed rows first, last freed first.
  int64_t take(int64_t s) {
    int64_t* row = slab(s);
    if (row[kSlabFreeCount] > 0) return free_rows_[s * max_rows_ + --row[kSlabFreeCount]];
    const int64_t next = row[kSlabNextRow]++;
    if (next >= row[kSlabCommittedRows]) {
      row[kSlabCommittedRows] = commit_target(next + 1, row[kSlabRowBytes], max_rows_);
    }
    return make_handle(next, kFirstGeneration);
  }

 private:
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
  check_size(op, "clock", clock, 0, 1);
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
  // Kept between calls, unless large: fresh memory would cost page faults in every call.
  static thread_local Misses kept;
  Misses& misses = kept;  // a lambda that named `kept` would see that of the thread it runs on
  const ReleaseLarge release(&misses);
  find_all(index, features, score, handle, &misses);
  if (misses.count() == 0) return handles;
  partition_misses(index, features, &misses);
  const std::vector<int64_t> new_ids = dedupe_misses(index.table_count, &misses);

  std::vector<int64_t> new_rows(slabs.size(0), 0);
  std::vector<GrowthDecision> growth(index.table_count);
  int64_t bytes = 0;
  for (int64_t t = 0; t < index.table_count; ++t) {
    const int64_t* row = index.table_row(t);
    new_rows[index.meta_row(t)[kMetaSlab]] += new_ids[t];
    growth[t] = decide_growth(row[kTableBucketCount], index.meta_row(t)[kMetaRegionBuckets],
                              row[kTableSize], row[kTableTombstones], new_ids[t]);
    if (growth[t].rehash) bytes += check_rehash(index, t, growth[t].bucket_count);
  }
  check_available_memory(op, bytes + allocator.check(new_rows));
  // Up to here nothing has been changed but the scores of the ids found.

  const int64_t tile_count = static_cast<int64_t>(misses.tiles.size());
  misses.handle.resize(misses.count());
  for (int64_t i = 0; i < tile_count; ++i) {
    const int64_t slab = index.meta_row(misses.tiles[i].table)[kMetaSlab];
    for (int64_t m = misses.tile_begin[i]; m < misses.tile_begin[i + 1]; ++m) {
      if (misses.first[m] == m) misses.handle[m] = allocator.take(slab);
    }
  }
  for (int64_t t = 0; t < index.table_count; ++t) {
    if (growth[t].rehash) rehash(index, t, growth[t].bucket_count);
    index.table_row(t)[kTableSize] += new_ids[t];
    index.table_row(t)[kTableInserted] += new_ids[t];
  }
  place_misses(index, score, misses);
  parallel_units(tile_count, misses.count(), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t tile_begin = misses.tiles[i].begin;
      for (int64_t m = misses.tile_begin[i]; m < misses.tile_begin[i + 1]; ++m) {
        const int64_t position = misses.in_tile[tile_begin + m - misses.tile_begin[i]];
        handle[tile_begin + position] = misses.handle[misses.first[m]];
      }
    }
  });
  return handles;
}

}  // namespace
}  // namespace dynemb::cpu

STABLE_TORCH_LIBRARY_IMPL(dynemb, CPU, m) {
  m.impl("find_or_insert_", TORCH_BOX(&dynemb::cpu::find_or_insert_));
}
