#include "cpu/storage/wanted_rows.h"

#include <algorithm>
#include <utility>

#include "core/index/handle.h"
#include "cpu/index/find.h"

namespace dynemb::cpu {
namespace {

// Identifies occurrences of one row: a slab and a row's number, or ~table and a new id.
using Wanted = std::pair<int64_t, int64_t>;

// Handles of the ids; nothing changes.
std::vector<int64_t> find_handles(const IndexArgs& index, const FeatureArgs& features,
                                  const std::vector<Tile>& tiles) {
  std::vector<int64_t> handles(static_cast<size_t>(features.count));
  std::vector<int64_t> missing(tiles.size());
  parallel_units(static_cast<int64_t>(tiles.size()), features.count,
                 [&](int64_t begin, int64_t end) {
                   for (int64_t t = begin; t < end; ++t) {
                     const Tile& tile = tiles[static_cast<size_t>(t)];
                     find_tile({index.table(tile.table), features.ids + tile.begin,
                                tile.end - tile.begin, handles.data() + tile.begin, nullptr,
                                &missing[static_cast<size_t>(t)], nullptr, ScoreUpdate{}});
                   }
                 });
  return handles;
}

}  // namespace

std::vector<int64_t> most_wanted_rows(const TierTensors& tiers, const FeatureArgs& features,
                                      const std::vector<int64_t>& slab_of) {
  std::vector<int64_t> rows(tiers.slabs.size(), 0);
  for (size_t f = 0; f < features.table.size(); ++f) {
    const auto slab = static_cast<size_t>(slab_of[static_cast<size_t>(features.table[f])]);
    if (tiers.slabs[slab].places == nullptr) continue;
    rows[slab] += features.begin[f + 1] - features.begin[f];
  }
  return rows;
}

std::vector<int64_t> wanted_rows(const char* op, const TierTensors& tiers, const IndexArgs& index,
                                 const FeatureArgs& features, const std::vector<int64_t>& slab_of) {
  const std::vector<Tile> tiles = make_tiles(features);
  const std::vector<int64_t> handles = find_handles(index, features, tiles);
  std::vector<Wanted> wanted;
  for (const Tile& tile : tiles) {
    const int64_t slab = slab_of[static_cast<size_t>(tile.table)];
    const CacheSlab& cache = tiers.slabs[static_cast<size_t>(slab)];
    if (cache.places == nullptr) continue;
    for (int64_t i = tile.begin; i < tile.end; ++i) {
      const int64_t handle = handles[static_cast<size_t>(i)];
      if (handle == kNoHandle) {
        wanted.emplace_back(~tile.table, features.ids[i]);
      } else if (handle >= 0) {
        const int64_t row = handle_row(handle);
        DYNEMB_CHECK(row < cache.max_rows, "dynemb::", op, ": a handle names row ", row,
                     ", but the table has ", cache.max_rows, " rows");
        if (cache.places[row] <= 0) wanted.emplace_back(slab, row);
      }
    }
  }
  std::sort(wanted.begin(), wanted.end());
  wanted.erase(std::unique(wanted.begin(), wanted.end()), wanted.end());
  std::vector<int64_t> rows(tiers.slabs.size(), 0);
  for (const Wanted& row : wanted) {
    ++rows[static_cast<size_t>(row.first >= 0 ? row.first
                                              : slab_of[static_cast<size_t>(~row.first)])];
  }
  return rows;
}

}  // namespace dynemb::cpu
