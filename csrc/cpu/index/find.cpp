#include "cpu/index/find.h"

#include <torch/csrc/stable/library.h>

#include <tuple>
#include <vector>

#include "cpu/index/find_block.h"
#include "cpu/index/one_writer.h"

namespace dynemb::cpu {
namespace {

// Records the missing ids of a block. Returns their number so far.
DYNEMB_INLINE int64_t note_missing(const FindJob& job, const Block& block, int64_t missing_count) {
  const int64_t* ids = job.ids + block.begin;
  int64_t* handles = job.handles + block.begin;
  if (job.missing == nullptr && !job.table.has_padding) {
    return missing_count + __builtin_popcountll(block.absent);
  }
  for (uint64_t absent = block.absent; absent != 0; absent &= absent - 1) {
    const int i = __builtin_ctzll(absent);
    if (job.table.has_padding && ids[i] == job.table.padding_id) {
      handles[i] = kPaddingHandle;  // never inserted, so always missing
      if (job.padding_count != nullptr) ++*job.padding_count;
      continue;
    }
    if (job.missing != nullptr) {
      job.missing[missing_count] = static_cast<int32_t>(block.begin + i);
    }
    ++missing_count;
  }
  return missing_count;
}

DYNEMB_INLINE void find_tile_simd_body(const FindJob& job) {
  const int64_t block_count = (job.count + kProbeBlock - 1) / kProbeBlock;
  Block blocks[kFindStages];
  int64_t missing_count = 0;
  for (int64_t b = 0; b < block_count + kFindStages - 1; ++b) {
    if (b < block_count) start_block(job, b * kProbeBlock, blocks[b % kFindStages]);
    match_blocks(job, blocks, b, block_count);
    const int64_t last = b - kFindStages + 1;
    if (last < 0) continue;
    Block& block = blocks[last % kFindStages];
    match_rest(job, block);
    missing_count = note_missing(job, block, missing_count);
  }
  *job.missing_count = missing_count;
}
DYNEMB_SIMD_VARIANTS(find_tile_simd, (const FindJob& job), (job))

// Handles of ids. Adds the number of missing ids of each table (padding ids excluded) to `missing`,
// unless it is nullptr.
Tensor find_all(const IndexArgs& index, const FeatureArgs& features, int64_t* missing) {
  Tensor handles = empty_cpu({features.count}, ScalarType::Long);
  auto* handle = static_cast<int64_t*>(handles.data_ptr());
  const std::vector<Tile> tiles = make_tiles(features);
  std::vector<int64_t> tile_missing(tiles.size());
  parallel_units(
      static_cast<int64_t>(tiles.size()), features.count, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          const Tile& tile = tiles[i];
          read_unmoved(index.tables, [&] {
            find_tile({index.table(tile.table), features.ids + tile.begin, tile.end - tile.begin,
                       handle + tile.begin, nullptr, &tile_missing[i], nullptr, ScoreUpdate{}});
          });
        }
      });
  if (missing == nullptr) return handles;
  for (size_t i = 0; i < tiles.size(); ++i) missing[tiles[i].table] += tile_missing[i];
  return handles;
}

std::tuple<Tensor, Tensor> find(Tensor buckets, Tensor tables, Tensor meta, Tensor ids,
                                Tensor offsets, std::vector<int64_t> feature_tables) {
  const IndexArgs index = index_args("find", buckets, nullptr, tables, meta);
  const FeatureArgs features =
      feature_args("find", ids, offsets, feature_tables, index.table_count);
  std::tuple<Tensor, Tensor> found;
  read_between_moves("find", index.tables, [&] {
    Tensor missing = zeros_cpu({index.table_count}, ScalarType::Long);
    Tensor handles = find_all(index, features, static_cast<int64_t*>(missing.data_ptr()));
    found = {handles, missing};
  });
  return found;
}

}  // namespace

void find_tile(const FindJob& job) { find_tile_simd(job); }

Tensor find_handles(const char* op, const Tensor& buckets, const Tensor& tables, const Tensor& meta,
                    const Tensor& ids, const Tensor& offsets,
                    const std::vector<int64_t>& feature_tables) {
  const IndexArgs index = index_args(op, buckets, nullptr, tables, meta);
  return find_all(index, feature_args(op, ids, offsets, feature_tables, index.table_count),
                  nullptr);
}

}  // namespace dynemb::cpu

STABLE_TORCH_LIBRARY_IMPL(dynemb, CPU, m) { m.impl("find", TORCH_BOX(&dynemb::cpu::find)); }
