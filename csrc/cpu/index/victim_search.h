// Search of a victim in a few buckets, four slots at a time.
#pragma once

#include <cstdint>

#include "core/policy/decisions.h"
#include "cpu/index/probe.h"

namespace dynemb::cpu {

struct VictimSearch {
  const TableView& table;
  int64_t clock;   // step
  int64_t order;   // of the new id: victims that earlier ones have claimed are not free
  int64_t newest;  // step of a victim, at most
  int64_t word;    // score that selects victims
};

DYNEMB_INLINE Words4 four(int64_t word) { return Words4{word, word, word, word}; }
DYNEMB_INLINE Words4 pick(Words4 mask, Words4 a, Words4 b) { return (mask & a) | (~mask & b); }

// The least word of a group of buckets, in all lanes.
DYNEMB_INLINE Words4 least_lane(Words4 words) {
  Words4 other = __builtin_shuffle(words, Words4{2, 3, 0, 1});
  words = pick(words < other, words, other);
  other = __builtin_shuffle(words, Words4{1, 0, 3, 2});
  return pick(words < other, words, other);
}

// Buckets that are searched together, and vectors of their slots.
constexpr int kGroupBuckets = 32 / kBucketWidth;
constexpr int kGroupVectors = 8;
static_assert(kVictimBuckets % kGroupBuckets == 0 && kMinBuckets % kGroupBuckets == 0,
              "whole groups are searched");

// Slots of the group by their vectors.
struct SlotGroup {
  Words4 free[kGroupVectors];  // masks
  Words4 step[kGroupVectors];
  Words4 score[kGroupVectors];

  // Leaves the slots with the least of `words` free; returns a bit for each of them.
  DYNEMB_INLINE uint64_t keep_least(const Words4* words) {
    Words4 least = four(INT64_MAX);
    for (int v = 0; v < kGroupVectors; ++v) {
      const Words4 some = pick(free[v], words[v], four(INT64_MAX));
      least = pick(some < least, some, least);
    }
    least = least_lane(least);
    Words4 bits = four(0);
    for (int v = 0; v < kGroupVectors; ++v) {
      free[v] &= words[v] == least;
      bits |= free[v] & (Words4{1, 2, 4, 8} << (4 * v));
    }
    return static_cast<uint64_t>(or_words(bits));
  }
};

// Marks the free slots of a group, given its step words; kClaimed: some of them are claims.
template <bool kByStep, bool kClaimed>
DYNEMB_INLINE void mark_free(const VictimSearch& search, const int64_t* buckets, SlotGroup* group) {
  const TableView& table = search.table;
  for (int v = 0; v < kGroupVectors; ++v) {
    const int64_t bucket = buckets[v * 4 / kBucketWidth];
    const int64_t slot = v * 4 % kBucketWidth;
    Words4 step = group->step[v];
    Words4 free = load_words(table.line(bucket) + kBucketWidth + slot) != 0;
    if constexpr (kClaimed) {
      const Words4 claimed = step < 0;
      const Words4 claim = (step ^ four(INT64_MIN)) >> 32;  // eviction_claim_order
      // step_of, for claims only; unsigned, because claims are close to the least number
      const auto ages = reinterpret_cast<UnsignedWords4>(four(search.clock)) -
                        reinterpret_cast<UnsignedWords4>(step);
      const Words4 age = reinterpret_cast<Words4>(ages) & four(0xffffffff);
      step = pick(claimed, four(search.clock) - age, step);
      free &= ~(claimed & (claim < four(search.order)));
    }
    group->free[v] = free & (step <= four(search.newest));
    group->step[v] = step;
    if constexpr (!kByStep) {
      group->score[v] = load_words(table.score(bucket, slot) + search.word * kBucketWidth);
    }
  }
}

// The number within the group of its best slot without an earlier claim, or -1. kByStep: the step
// is the score.
template <bool kByStep>
DYNEMB_INLINE int64_t best_of_group(const VictimSearch& search, const int64_t* buckets) {
  SlotGroup group;
  // Read once: meanwhile other threads may claim slots.
  Words4 steps = four(0);
  for (int v = 0; v < kGroupVectors; ++v) {
    const int64_t bucket = buckets[v * 4 / kBucketWidth];
    group.step[v] = load_words(search.table.score(bucket, v * 4 % kBucketWidth));
    steps |= group.step[v];
  }
  if (or_words(steps) >= 0) {
    mark_free<kByStep, false>(search, buckets, &group);
  } else {
    mark_free<kByStep, true>(search, buckets, &group);
  }
  uint64_t best = group.keep_least(kByStep ? group.step : group.score);
  if (!kByStep && (best & (best - 1)) != 0) best = group.keep_least(group.step);
  if (best == 0) return -1;
  const auto key = [&](int64_t slot) {
    return search.table.line(buckets[slot / kBucketWidth])[slot % kBucketWidth];
  };
  int64_t least = __builtin_ctzll(best);
  for (best &= best - 1; best != 0; best &= best - 1) {
    const int64_t next = __builtin_ctzll(best);
    if (key(next) < key(least)) least = next;
  }
  return least;
}

// The step word of a slot, given its number in the table.
DYNEMB_INLINE int64_t* step_word(const TableView& table, int64_t slot) {
  return table.score(slot / kBucketWidth, slot % kBucketWidth);
}

// The number in the table of the best victim of `count` buckets from `first` on, or -1. Other
// threads may claim it meanwhile.
template <bool kByStep>
DYNEMB_INLINE int64_t search_buckets(const VictimSearch& search, int64_t first, int64_t count) {
  const TableView& table = search.table;
  const auto rank = [&](int64_t slot) {
    const int64_t* word = step_word(table, slot);
    return VictimRank{kByStep ? 0 : word[search.word * kBucketWidth], step_of(*word, search.clock),
                      table.line(slot / kBucketWidth)[slot % kBucketWidth]};
  };
  int64_t best = -1;
  for (int64_t group = 0; group < count; group += kGroupBuckets) {
    int64_t buckets[kGroupBuckets];
    for (int64_t k = 0; k < kGroupBuckets; ++k) {
      const int64_t bucket = first + group + k;
      buckets[k] = bucket < table.bucket_count ? bucket : bucket - table.bucket_count;
    }
    const int64_t slot = best_of_group<kByStep>(search, buckets);
    if (slot < 0) continue;
    const int64_t found = buckets[slot / kBucketWidth] * kBucketWidth + slot % kBucketWidth;
    if (best < 0 || goes_before(rank(found), rank(best))) best = found;
  }
  return best;
}

}  // namespace dynemb::cpu
