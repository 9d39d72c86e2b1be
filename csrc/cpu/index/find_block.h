// The first stages of a lookup, block by block: shared by find and by the insertion in one pass.
#pragma once

#include <algorithm>
#include <cstring>

#include "cpu/index/find.h"
#include "cpu/index/probe_block.h"
#include "cpu/runtime/simd.h"

namespace dynemb::cpu {

// A block goes through stages, while lines of other blocks are being fetched: its first buckets are
// fetched; they are compared, and second buckets fetched for the ids that may be there; these are
// compared, and third ones fetched, and so on.
struct Block {
  uint64_t hash[kProbeBlock];
  int64_t bucket[kProbeBlock];
  int64_t begin;
  int64_t count;
  uint64_t absent;  // a bit for each id not found yet
  int64_t later_count;
  int32_t later[kProbeBlock];         // ids that may be in a later bucket of their sequence
  int64_t later_bucket[kProbeBlock];  // the next bucket of each of them
};
static_assert(kProbeBlock == 64, "a bit of a word for each id of a block");

constexpr int64_t kLaterStages = 4;  // second to fifth buckets
constexpr int64_t kFindStages = 2 + kLaterStages;

DYNEMB_INLINE void start_block(const FindJob& job, int64_t begin, Block& block) {
  block.begin = begin;
  block.count = std::min(kProbeBlock, job.count - begin);
  fetch_lines(job.table, job.ids + begin, block.count, block.hash, block.bucket);
  if (job.table.scores == nullptr) return;
  for (int64_t i = 0; i < block.count; ++i) {
    prefetch_line_of(job.table.score(block.bucket[i], 0));
  }
}

// Several threads may find one id: their changes of its words commute.
inline void refresh_scores(const ScoreUpdate& update, int64_t* score) {
  const auto store = [&](int word, int64_t value) {
    if (word != 0) __atomic_store_n(score + word * kBucketWidth, value, __ATOMIC_RELAXED);
  };
  store(update.timestamp_word, update.now);
  store(update.custom_word, update.custom);
  if (update.frequency_word != 0) {
    int64_t* word = score + update.frequency_word * kBucketWidth;
    // beyond the limit every thread resets it, including the last one
    if (__atomic_add_fetch(word, 1, __ATOMIC_RELAXED) > kMaxFrequency) {
      __atomic_store_n(word, kMaxFrequency, __ATOMIC_RELAXED);
    }
  }
  if (update.decayed_word != 0) {
    int64_t* word = score + update.decayed_word * kBucketWidth;
    int64_t seen = __atomic_load_n(word, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(word, &seen, add_decayed(seen, update.decay_time), true,
                                        __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
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
  // An id can be beyond its first bucket only if that was full once.
  int64_t later_count = 0;
  for (; absent != 0; absent &= absent - 1) {
    const int id = __builtin_ctzll(absent);
    block.later[later_count] = id;
    later_count += !has_empty_slot(job.table.line(block.bucket[id]));
  }
  block.later_count = later_count;
  for (int64_t r = 0; r < later_count; ++r) {
    const uint64_t hash = second_hash(block.hash[block.later[r]]);
    block.later_bucket[r] = bucket_of(hash, job.table.bucket_count);
    prefetch_line(job.table.line(block.later_bucket[r]));
  }
}

// Compares the later buckets that have been fetched, and fetches the next ones. Almost without
// branches, because hits are unpredictable.
DYNEMB_INLINE void match_later_buckets(const FindJob& job, Block& block) {
  const int64_t* ids = job.ids + block.begin;
  int64_t* handles = job.handles + block.begin;
  uint64_t absent = block.absent;
  int64_t later_count = 0;
  for (int64_t r = 0; r < block.later_count; ++r) {
    const int32_t i = block.later[r];
    const int64_t bucket = block.later_bucket[r];
    const int64_t* line = job.table.line(bucket);
    const int64_t stored = match_stored(line, ids[i]);
    handles[i] = decode_handle(stored);
    absent &= ~(static_cast<uint64_t>(stored != 0) << i);
    if (job.table.scores != nullptr && stored != 0) {
      update_scores(job, bucket, match_slot(line, ids[i]));
    }
    block.later[later_count] = i;
    block.later_bucket[later_count] = bucket + 1 < job.table.bucket_count ? bucket + 1 : 0;
    later_count += (stored == 0) & !has_empty_slot(line);
  }
  block.absent = absent;
  block.later_count = later_count;
  for (int64_t r = 0; r < later_count; ++r) prefetch_line(job.table.line(block.later_bucket[r]));
}

// The middle stages of the blocks in flight, when block `b` starts.
DYNEMB_INLINE void match_blocks(const FindJob& job, Block* blocks, int64_t b, int64_t block_count) {
  if (b >= 1 && b <= block_count) match_first_buckets(job, blocks[(b - 1) % kFindStages]);
  for (int64_t stage = 2; stage < kFindStages && stage <= b; ++stage) {
    if (b - stage < block_count) match_later_buckets(job, blocks[(b - stage) % kFindStages]);
  }
}

// Searches one by one for the few ids with only full buckets so far.
DYNEMB_INLINE void match_rest(const FindJob& job, Block& block) {
  const int64_t* ids = job.ids + block.begin;
  for (int64_t r = 0; r < block.later_count; ++r) {
    const int32_t i = block.later[r];
    const SlotPosition position = probe(job.table, ids[i], block.hash[i], 1 + kLaterStages);
    if (position.bucket < 0) continue;
    const int64_t* line = job.table.line(position.bucket);
    job.handles[block.begin + i] = decode_handle(line[kBucketWidth + position.slot]);
    if (job.table.scores != nullptr) update_scores(job, position.bucket, position.slot);
    block.absent &= ~(uint64_t{1} << i);
  }
}

}  // namespace dynemb::cpu
