#include "cpu/index/find.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "cpu/index/probe_block.h"
#include "cpu/runtime/simd.h"

namespace dynemb::cpu {
namespace {

// A block goes through three stages, each while lines of the others are on their way: its first
// buckets are fetched; they are compared, and second buckets fetched for the ids that may be there;
// these are compared.
struct Block {
  uint64_t hash[kProbeBlock];
  int64_t bucket[kProbeBlock];
  int64_t begin;
  int64_t count;
  uint64_t absent;  // a bit for each id that has not been found
  int64_t second_count;
  int32_t second[kProbeBlock];         // ids that may be in their second buckets
  int64_t second_bucket[kProbeBlock];  // and those
};
static_assert(kProbeBlock == 64, "a bit of a word for each id of a block");

DYNEMB_INLINE void start_block(const FindJob& job, int64_t begin, Block& block) {
  block.begin = begin;
  block.count = std::min(kProbeBlock, job.count - begin);
  fetch_lines(job.table, job.ids + begin, block.count, block.hash, block.bucket);
  if (job.table.scores == nullptr) return;
  for (int64_t i = 0; i < block.count; ++i) {
    __builtin_prefetch(job.table.score(block.bucket[i], 0), 1);
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

DYNEMB_INLINE void match_first_buckets(const FindJob& job, Block& block) {
  int64_t* const lines = job.table.lines;
  const int64_t* ids = job.ids + block.begin;
  int64_t* handles = job.handles + block.begin;
  uint64_t absent = 0;
  int64_t i = 0;
  for (; i + 4 <= block.count; i += 4) {
    const Words4 stored = match_four(lines, block.bucket + i, ids + i);
    // decode_handle of four; unsigned, because a damaged word may be the least number
    const auto handle = reinterpret_cast<UnsignedWords4>(stored) - 1;
    std::memcpy(handles + i, &handle, sizeof handle);
    const Words4 missing = (stored == 0) & Words4{1, 2, 4, 8};
    absent |= static_cast<uint64_t>(or_words(missing)) << i;
  }
  for (; i < block.count; ++i) {
    const int64_t stored = match_stored(job.table.line(block.bucket[i]), ids[i]);
    handles[i] = decode_handle(stored);
    absent |= static_cast<uint64_t>(stored == 0) << i;
  }
  if (job.table.scores != nullptr) {
    for (i = 0; i < block.count; ++i) {
      if (((absent >> i) & 1) != 0) continue;
      update_scores(job, block.bucket[i], match_slot(job.table.line(block.bucket[i]), ids[i]));
    }
  }
  block.absent = absent;
  // An id is past its first bucket only if that was full once.
  int64_t second_count = 0;
  for (; absent != 0; absent &= absent - 1) {
    const int id = __builtin_ctzll(absent);
    block.second[second_count] = id;
    second_count += !has_empty_slot(job.table.line(block.bucket[id]));
  }
  block.second_count = second_count;
  for (int64_t r = 0; r < second_count; ++r) {
    const uint64_t hash = second_hash(block.hash[block.second[r]]);
    block.second_bucket[r] = bucket_of(hash, job.table.bucket_count);
    prefetch_line(job.table.line(block.second_bucket[r]));
  }
}

// Also writes down who is missing. Returns how many are, up to this block.
DYNEMB_INLINE int64_t match_second_buckets(const FindJob& job, Block& block,
                                           int64_t missing_count) {
  const int64_t* ids = job.ids + block.begin;
  int64_t* handles = job.handles + block.begin;
  for (int64_t r = 0; r < block.second_count; ++r) {
    const int32_t i = block.second[r];
    const int64_t* line = job.table.line(block.second_bucket[r]);
    SlotPosition position{block.second_bucket[r], 0};
    int64_t stored = match_stored(line, ids[i]);
    if (stored != 0) {
      position.slot = match_slot(line, ids[i]);
    } else if (!has_empty_slot(line)) {
      position = probe(job.table, ids[i], block.hash[i], 2);
      if (position.bucket < 0) continue;
      stored = job.table.line(position.bucket)[kBucketWidth + position.slot];
    } else {
      continue;
    }
    handles[i] = decode_handle(stored);
    if (job.table.scores != nullptr) update_scores(job, position.bucket, position.slot);
    block.absent &= ~(uint64_t{1} << i);
  }
  if (job.missing == nullptr && !job.table.has_padding) {
    return missing_count + __builtin_popcountll(block.absent);
  }
  for (uint64_t absent = block.absent; absent != 0; absent &= absent - 1) {
    const int i = __builtin_ctzll(absent);
    if (job.table.has_padding && ids[i] == job.table.padding_id) {
      handles[i] = kPaddingHandle;  // never inserted, so always found missing
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
  Block blocks[3];
  int64_t missing_count = 0;
  for (int64_t b = 0; b < block_count + 2; ++b) {
    if (b < block_count) start_block(job, b * kProbeBlock, blocks[b % 3]);
    if (b >= 1 && b <= block_count) match_first_buckets(job, blocks[(b - 1) % 3]);
    if (b >= 2) missing_count = match_second_buckets(job, blocks[(b - 2) % 3], missing_count);
  }
  *job.missing_count = missing_count;
}
DYNEMB_SIMD_VARIANTS(find_tile_simd, (const FindJob& job), (job))

// Handles of ids, and per table how many are missing (padding ids are not counted).
// Adds to `missing`, unless it is nullptr, how many ids each table lacks.
Tensor find_all(const IndexArgs& index, const FeatureArgs& features, int64_t* missing) {
  Tensor handles = empty_cpu({features.count}, ScalarType::Long);
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
  if (missing == nullptr) return handles;
  for (size_t i = 0; i < tiles.size(); ++i) missing[tiles[i].table] += tile_missing[i];
  return handles;
}

std::tuple<Tensor, Tensor> find(Tensor buckets, Tensor tables, Tensor meta, Tensor ids,
                                Tensor offsets, std::vector<int64_t> feature_tables) {
  const IndexArgs index = index_args("find", buckets, nullptr, tables, meta);
  const FeatureArgs features =
      feature_args("find", ids, offsets, feature_tables, index.table_count);
  Tensor missing = zeros_cpu({index.table_count}, ScalarType::Long);
  Tensor handles = find_all(index, features, static_cast<int64_t*>(missing.data_ptr()));
  return {handles, missing};
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
