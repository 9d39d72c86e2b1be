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

// The buckets of a group, given the first of them.
struct GroupBuckets {
  int64_t bucket[kGroupBuckets];
};
DYNEMB_INLINE GroupBuckets group_buckets(const TableView& table, int64_t first) {
  GroupBuckets group;
  for (int64_t k = 0; k < kGroupBuckets; ++k) {
    const int64_t bucket = first + k;
    group.bucket[k] = bucket < table.bucket_count ? bucket : bucket - table.bucket_count;
  }
  return group;
}

// Marks the slots that may be taken, given their step words. kClaimed: some of them are claims.
// kLines: the steps do not tell all free slots.
template <bool kByStep, bool kClaimed, bool kLines>
DYNEMB_INLINE void mark_free(const VictimSearch& search, const GroupBuckets& buckets,
                             SlotGroup* group) {
  const TableView& table = search.table;
  for (int v = 0; v < kGroupVectors; ++v) {
    const int64_t bucket = buckets.bucket[v * 4 / kBucketWidth];
    const int64_t slot = v * 4 % kBucketWidth;
    Words4 step = group->step[v];
    Words4 free = four(-1);
    if constexpr (kLines) free = load_words(table.line(bucket) + kBucketWidth + slot) != 0;
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

// The best slots of a group without an earlier claim: a bit for each, none if there are none. Their
// ids decide between several. kByStep: the step is the score. `lines`: out, whether lines were
// read.
template <bool kByStep>
DYNEMB_INLINE uint64_t best_of_group(const VictimSearch& search, const GroupBuckets& buckets,
                                     bool* lines) {
  SlotGroup group;
  // Read once: meanwhile other threads may claim slots.
  Words4 steps = four(0);
  Words4 zeros = four(0);
  for (int v = 0; v < kGroupVectors; ++v) {
    const int64_t bucket = buckets.bucket[v * 4 / kBucketWidth];
    group.step[v] = load_words(search.table.score(bucket, v * 4 % kBucketWidth));
    steps |= group.step[v];
    zeros |= group.step[v] == 0;
  }
  const bool claimed = or_words(steps) < 0;
  *lines = or_words(zeros) != 0;
  if (*lines) {
    claimed ? mark_free<kByStep, true, true>(search, buckets, &group)
            : mark_free<kByStep, false, true>(search, buckets, &group);
  } else {
    claimed ? mark_free<kByStep, true, false>(search, buckets, &group)
            : mark_free<kByStep, false, false>(search, buckets, &group);
  }
  uint64_t best = group.keep_least(kByStep ? group.step : group.score);
  if (!kByStep && (best & (best - 1)) != 0) best = group.keep_least(group.step);
  return best;
}

// The number in the table of the slot with the least id of `best`, or -1.
DYNEMB_INLINE int64_t least_id(const TableView& table, const GroupBuckets& buckets, uint64_t best) {
  if (best == 0) return -1;
  const auto slot_of = [&](int number) {
    return buckets.bucket[number / kBucketWidth] * kBucketWidth + number % kBucketWidth;
  };
  const auto key = [&](int64_t slot) {
    return table.line(slot / kBucketWidth)[slot % kBucketWidth];
  };
  int64_t least = slot_of(__builtin_ctzll(best));
  for (best &= best - 1; best != 0; best &= best - 1) {
    const int64_t next = slot_of(__builtin_ctzll(best));
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
    const GroupBuckets buckets = group_buckets(table, first + group);
    bool lines;
    const int64_t found = least_id(table, buckets, best_of_group<kByStep>(search, buckets, &lines));
    if (found < 0) continue;
    if (best < 0 || goes_before(rank(found), rank(best))) best = found;
  }
  return best;
}

}  // namespace dynemb::cpu
