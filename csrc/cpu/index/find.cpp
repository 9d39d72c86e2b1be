#include "cpu/index/find.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "cpu/index/probe.h"
#include "cpu/runtime/simd.h"

namespace dynemb::cpu {
namespace {

// Lines of the next block are on their way while a block is compared.
constexpr int64_t kBlock = 64;

struct Block {
  uint64_t hash[kBlock];
  int64_t bucket[kBlock];
};

DYNEMB_INLINE void start_block(const FindJob& job, int64_t begin, int64_t count, Block& block) {
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t hash = first_hash(job.ids[begin + i], job.table.salt);
    const int64_t bucket = bucket_of(hash, job.table.bucket_count);
    block.hash[i] = hash;
    block.bucket[i] = bucket;
    prefetch_line(job.table.line(bucket));
    if (job.table.scores != nullptr) __builtin_prefetch(job.table.score(bucket, 0), 1);
  }
}

// Several threads may find one id: what they do to its words does not depend on their order.
void refresh_scores(const ScoreUpdate& update, int64_t* score) {
  const auto store = [&](int word, int64_t value) {
    if (word != 0) __atomic_store_n(score + word * kBucketWidth, value, __ATOMIC_RELAXED);
  };
  store(update.timestamp_word, update.now);
  store(update.custom_word, update.custom);
  if (update.frequency_word != 0) {
    int64_t* word = score + update.frequency_word * kBucketWidth;
    // beyond the limit every thread comes back to it, the last one too
    if (__atomic_add_fetch(word, 1, __ATOMIC_RELAXED) > kMaxFrequency) {
      __atomic_store_n(word, kMaxFrequency, __ATOMIC_RELAXED);
    }
  }
  if (update.expiry_word != 0) {
    int64_t* word = score + update.expiry_word * kBucketWidth;
    int64_t seen = __atomic_load_n(word, __ATOMIC_RELAXED);
    while (seen < update.expires &&
           !__atomic_compare_exchange_n(word, &seen, update.expires, true, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED)) {
    }
  }
}

DYNEMB_INLINE void update_scores(const FindJob& job, int64_t bucket, int64_t slot) {
  int64_t* score = job.table.score(bucket, slot);
  __atomic_store_n(score, job.update.step, __ATOMIC_RELAXED);
  if (job.update.refresh) refresh_scores(job.update, score);
}

// Misses are collected without a branch and looked at again: first whether the bucket was ever
// full, then the rest of the probe sequence.
DYNEMB_INLINE int64_t finish_block(const FindJob& job, int64_t begin, int64_t count,
                                   const Block& block, int64_t missing_count) {
  int32_t retry[kBlock];
  int64_t retries = 0;
  int64_t* handles = job.handles + begin;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t* line = job.table.line(block.bucket[i]);
    const int64_t id = job.ids[begin + i];
    const int64_t stored = match_stored(line, id);
    handles[i] = decode_handle(stored);
    retry[retries] = static_cast<int32_t>(i);
    retries += stored == 0;
    if (job.table.scores != nullptr && stored != 0) {
      update_scores(job, block.bucket[i], match_slot(line, id));
    }
  }
  if (retries == 0) return missing_count;
  bool go_on[kBlock];
  for (int64_t r = 0; r < retries; ++r) {
    const int64_t i = retry[r];
    go_on[r] = !has_empty_slot(job.table.line(block.bucket[i]));
    if (go_on[r]) {
      prefetch_line(job.table.line(bucket_of(second_hash(block.hash[i]), job.table.bucket_count)));
    }
  }
  for (int64_t r = 0; r < retries; ++r) {
    const int64_t i = retry[r];
    const int64_t id = job.ids[begin + i];
    if (go_on[r]) {
      const SlotPosition position = probe(job.table, id, block.hash[i], 1);
      if (position.bucket >= 0) {
        handles[i] = decode_handle(job.table.line(position.bucket)[kBucketWidth + position.slot]);
        if (job.table.scores != nullptr) update_scores(job, position.bucket, position.slot);
        continue;
      }
    }
    if (job.table.has_padding && id == job.table.padding_id) {
      handles[i] = kPaddingHandle;  // never inserted, so always found missing
      if (job.padding_count != nullptr) ++*job.padding_count;
      continue;
    }
    if (job.missing != nullptr) job.missing[missing_count] = static_cast<int32_t>(begin + i);
    ++missing_count;
  }
  return missing_count;
}

DYNEMB_INLINE void find_tile_simd_body(const FindJob& job) {
  Block blocks[2];
  int64_t missing_count = 0;
  int64_t current = 0;
  if (job.count > 0) start_block(job, 0, std::min(kBlock, job.count), blocks[0]);
  for (int64_t begin = 0; begin < job.count; begin += kBlock) {
    const int64_t next = begin + kBlock;
    if (next < job.count) {
      start_block(job, next, std::min(kBlock, job.count - next), blocks[1 - current]);
    }
    missing_count = finish_block(job, begin, std::min(kBlock, job.count - begin), blocks[current],
                                 missing_count);
    current = 1 - current;
  }
  *job.missing_count = missing_count;
}
DYNEMB_SIMD_VARIANTS(find_tile_simd, (const FindJob& job), (job))

// Handles of ids, and per table how many are missing (padding ids are not counted).
std::tuple<Tensor, Tensor> find(Tensor buckets, Tensor tables, Tensor meta, Tensor ids,
                                Tensor offsets, std::vector<int64_t> feature_tables) {
  const IndexArgs index = index_args("find", buckets, nullptr, tables, meta);
  const FeatureArgs features =
      feature_args("find", ids, offsets, feature_tables, index.table_count);
  Tensor handles = empty_cpu({features.count}, ScalarType::Long);
  Tensor missing = zeros_cpu({index.table_count}, ScalarType::Long);
  auto* handle = static_cast<int64_t*>(handles.data_ptr());
  const std::vector<Tile> tiles = make_tiles(features);
  std::vector<int64_t> tile_missing(tiles.size());
  parallel_units(
      static_cast<int64_t>(tiles.size()), features.count, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          const Tile& tile = tiles[i];
          find_tile({index.table(tile.table), features.ids + tile.begin, tile.end - tile.begin,
                     handle + tile.begin, nullptr, &tile_missing[i], nullptr, ScoreUpdate{}});
        }
      });
  auto* count = static_cast<int64_t*>(missing.data_ptr());
  for (size_t i = 0; i < tiles.size(); ++i) count[tiles[i].table] += tile_missing[i];
  return {handles, missing};
}

}  // namespace

void find_tile(const FindJob& job) { find_tile_simd(job); }

}  // namespace dynemb::cpu

STABLE_TORCH_LIBRARY_IMPL(dynemb, CPU, m) { m.impl("find", TORCH_BOX(&dynemb::cpu::find)); }
