// Life-cycle policies on the device (core/policy/decisions.h): changes of scores by lookups, and
// insertion of the new ids of a call.
#pragma once

#include "core/policy/decisions.h"
#include "core/policy/waiting.h"
#include "cuda/index/placement.cuh"

namespace dynemb::cuda {

struct PolicyArgs {
  const int64_t* rows;  // nullptr: no table has a policy
  const int64_t* clock;
  const int64_t* of_feature;  // on the device

  __device__ __forceinline__ const int64_t* row(int64_t policy) const {
    return rows + policy * kPolicyColumns;
  }
  __device__ __forceinline__ const int64_t* feature_row(int64_t feature) const {
    return row(of_feature[feature]);
  }
};

// Changes the scores of an id that a lookup has found, and returns the word of its decayed count,
// or nullptr: a warp changes these together. Several threads may find one id: their changes
// commute.
__device__ __forceinline__ int64_t* refresh_scores(const ScoreUpdate& update, int64_t* score) {
  // all threads write the same time, and the same custom score
  if (update.timestamp_word != 0) {
    store_racing(score + update.timestamp_word * kBucketWidth, update.now);
  }
  if (update.custom_word != 0) {
    store_racing(score + update.custom_word * kBucketWidth, update.custom);
  }
  if (update.frequency_word != 0) {
    int64_t* word = score + update.frequency_word * kBucketWidth;
    const auto before =
        static_cast<int64_t>(atomicAdd(reinterpret_cast<unsigned long long*>(word), 1ULL));
    // beyond the limit every thread resets it, including the last one
    if (before >= kMaxFrequency) {
      atomicMin(reinterpret_cast<long long*>(word), static_cast<long long>(kMaxFrequency));
    }
  }
  if (update.expiry_word != 0) {
    auto* word = reinterpret_cast<long long*>(score + update.expiry_word * kBucketWidth);
    atomicMax(word, static_cast<long long>(update.expires));
  }
  return update.decayed_word == 0 ? nullptr : score + update.decayed_word * kBucketWidth;
}

// Adds an occurrence to the decayed count of each lane that has one. All lanes of the warp must
// call it. Lanes of one count and time add one after another in one of them, because threads that
// exchange a word wait for each other: the most frequent id of a batch is in almost every warp.
__device__ __forceinline__ void add_occurrences(int64_t* count, int64_t time) {
  constexpr unsigned kAll = 0xffffffffu;
  if (__ballot_sync(kAll, count != nullptr) == 0) return;
  const auto address = static_cast<long long>(reinterpret_cast<intptr_t>(count));
  const unsigned same =
      __match_any_sync(kAll, address) & __match_any_sync(kAll, static_cast<long long>(time));
  const int lane = static_cast<int>(threadIdx.x) & 31;
  if (count == nullptr || lane != __ffs(static_cast<int>(same)) - 1) return;
  auto* word = reinterpret_cast<unsigned long long*>(count);
  unsigned long long seen = load_racing(word);  // atomicCAS refuses an older value
  for (;;) {
    auto sum = static_cast<int64_t>(seen);
    for (int n = __popc(same); n > 0; --n) sum = add_decayed(sum, time);
    const unsigned long long found = atomicCAS(word, seen, static_cast<unsigned long long>(sum));
    if (found == seen) return;
    seen = found;
  }
}

// Data about a call's new ids, collected before anything changes.
struct NewIds {
  // by slot of the dedupe table
  int32_t* occurrences;  // in lookups that update scores
  uint8_t* wanted;       // set if `admit` is true at an occurrence
  // largest ranks of the features that bring the id; nullptr: those of a table have one policy
  unsigned long long* expiry_ranks;
  unsigned long long* threshold_ranks;
  // by position, of first occurrences
  uint8_t* verdicts;  // Verdict
  int64_t* counts;    // kAdmitFrequent: position of the id's counter (pack_place), -1: none;
                      // kAdmitFrequentSketch: its count

  __device__ __forceinline__ void note_feature(int64_t slot, const int64_t* policy,
                                               const int64_t* clock) const {
    if (expiry_ranks == nullptr) return;
    atomicMax(expiry_ranks + slot, static_cast<unsigned long long>(expiry_rank(policy, clock)));
    atomicMax(threshold_ranks + slot, static_cast<unsigned long long>(threshold_rank(policy)));
  }
  // `policy`: of the first feature that brings the id.
  __device__ __forceinline__ int64_t threshold(int64_t slot, const int64_t* policy) const {
    return expiry_ranks == nullptr ? policy[kPolicyThreshold]
                                   : ranked_threshold(threshold_ranks[slot]);
  }
};

// Adds to a count of a table; no other thread reads it meanwhile.
__device__ __forceinline__ void add_to_table(const IndexArgs& index, int64_t table, int column,
                                             int64_t number) {
  atomicAdd(reinterpret_cast<unsigned long long*>(index.table_row(table) + column),
            static_cast<unsigned long long>(number));
}

// New ids to be placed, by order of first occurrence. Ids that are counted for the first time go
// into a counter table, including ids that turn out to get no row.
struct PlacedIds {
  static constexpr int64_t kRefused = 0;
  static constexpr int64_t kNeedsVictim = -1;

  IndexArgs index;
  FeatureArgs features;
  PolicyArgs policies;
  int32_t* positions;
  int32_t* feature;      // of the first occurrence; ~feature for an id that is only counted
  int64_t* stored_word;  // kRefused, kNeedsVictim, or the handle that the index stores
  int32_t* occurrences;  // admitted_frequency
  int64_t* expires;      // nullptr: by the policy of the feature

  __device__ __forceinline__ int64_t table(int64_t order) const {
    const int32_t f = feature[order];
    return f >= 0 ? features.table[f] : policies.feature_row(~f)[kPolicyCounterTable];
  }
  __device__ __forceinline__ int64_t id(int64_t order) const {
    return features.ids[positions[order]];
  }
  __device__ __forceinline__ Entry operator()(int64_t order) const {
    const TableView view = table_view(index, table(order));
    const int64_t key = id(order);
    return {view, key, first_hash(key, view.salt), kClaimFirst};
  }
  __device__ __forceinline__ bool placed(int64_t order) const {
    return stored_word[order] != kRefused;
  }
  __device__ __forceinline__ int64_t stored(int64_t order) const { return stored_word[order]; }

  // Redirects the id of this order to its counter table, if it has occurred; `f` is the first
  // feature that brings it.
  __device__ __forceinline__ void count_instead(int64_t order, int64_t f) const {
    const int64_t* policy = policies.feature_row(f);
    stored_word[order] =
        add_waiting(policy, waiting_time(policy, policies.clock), 0, occurrences[order]);
    if (stored_word[order] == kRefused) return;
    feature[order] = static_cast<int32_t>(~f);
    const int64_t counters = policy[kPolicyCounterTable];
    add_to_table(index, counters, kTableSize, 1);
    add_to_table(index, counters, kTableInserted, 1);
  }

  struct Score {
    ScoreUpdate update;
    int64_t occurrences;
    __device__ __forceinline__ int64_t operator()(int64_t word) const {
      return new_score(update, static_cast<int>(word), occurrences);
    }
  };
  __device__ __forceinline__ Score score(int64_t order) const {
    const int32_t f = feature[order] >= 0 ? feature[order] : ~feature[order];
    ScoreUpdate update = policy_update(policies.feature_row(f), policies.clock, features.table[f]);
    if (expires != nullptr) update.expires = expires[order];
    return {update, occurrences[order]};
  }
};

// Raises the cells of an id to `count`.
__device__ __forceinline__ void note_in_sketch(const IndexArgs& index, const int64_t* policy,
                                               int64_t t, int64_t id, int32_t count,
                                               int32_t* sketch) {
  const uint64_t salt = bucket_salt(index.meta_row(t)[kMetaSeed]);
#pragma unroll
  for (int row = 0; row < kSketchRows; ++row) {
    const int64_t cell = sketch_cell(id, salt, row, policy[kPolicySketchWidth]);
    atomicMax(sketch + policy[kPolicySketchBegin] + cell, count);
  }
}

// Removes the exact count of an id. `kept_tombstones`: tombstones that a coming rehash does not
// drop.
__device__ __forceinline__ void clear_counter(const IndexArgs& index, int64_t counter_table,
                                              const SlotPlace& place, bool kept_tombstones) {
  if (clear_slot(table_view(index, counter_table), place) && kept_tombstones) {
    add_to_table(index, counter_table, kTableTombstones, 1);
  }
  add_to_table(index, counter_table, kTableSize, -1);
  add_to_table(index, counter_table, kTableErased, 1);
}

}  // namespace dynemb::cuda
