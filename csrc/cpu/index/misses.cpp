#include "cpu/index/misses.h"

#include <algorithm>

namespace dynemb::cpu {
namespace {

// Few misses form one partition.
int64_t partition_of(const Misses& misses, uint64_t hash) {
  return misses.count() < kParallelWork ? 0 : static_cast<int64_t>(hash >> 58);
}

}  // namespace

void find_all(const IndexArgs& index, const FeatureArgs& features, const PolicyArgs& policies,
              int64_t* handles, Misses* misses) {
  misses->tiles = make_tiles(features);
  const std::vector<Tile>& tiles = misses->tiles;
  const int64_t tile_count = static_cast<int64_t>(tiles.size());
  misses->tile_begin.assign(tile_count + 1, 0);
  misses->tile_padding.assign(tile_count, 0);
  misses->in_tile.resize(features.count);
  parallel_units(tile_count, features.count, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Tile& tile = tiles[i];
      find_tile({index.table(tile.table), features.ids + tile.begin, tile.end - tile.begin,
                 handles + tile.begin, misses->in_tile.data() + tile.begin,
                 &misses->tile_begin[i + 1], &misses->tile_padding[i],
                 policies.update(tile.feature, tile.table)});
    }
  });
  for (int64_t i = 0; i < tile_count; ++i) misses->tile_begin[i + 1] += misses->tile_begin[i];
}

void partition_misses(const IndexArgs& index, const FeatureArgs& features, Misses* misses) {
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

}  // namespace dynemb::cpu
