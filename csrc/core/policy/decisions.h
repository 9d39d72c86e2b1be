// Life-cycle policies of tables and features: scores of an id, admission, and the choice of victims
// when rows run out. Decisions are functions of values that do not depend on the order of threads,
// so every device makes the same ones.
#pragma once

#include "core/index/bucket.h"
#include "core/index/hash.h"
#include "core/policy/counts.h"
#include "core/policy/decay.h"
#include "core/rows/philox.h"

namespace dynemb {

// `policy` int64 [policies, kPolicyColumns]: first one row per table. Then copies of them with some
// columns changed: for features with a policy of their own, and to insert without admission.
enum PolicyColumn : int {
  kPolicyTimestampWord = 0,  // which word of an id's scores; 0: not kept
  kPolicyFrequencyWord = 1,
  kPolicyCustomWord = 2,
  kPolicyExpiryWord = 3,
  kPolicyEvictionWord = 4,    // score that selects victims
  kPolicyUpdatesScores = 5,   // 0: lookups change the step only
  kPolicyTtl = 6,             // seconds; 0: none
  kPolicyCapacity = 7,        // ids; 0: none
  kPolicyOnFull = 8,          // OnFull
  kPolicyProtectedSteps = 9,  // ids seen in so many steps, including the current one, are not
                              // evicted
  kPolicyAdmission = 10,      // Admission
  kPolicyThreshold = 11,      // occurrences
  kPolicyChance = 12,         // probability times 2^32
  kPolicyCounterTable = 13,   // of exact counts
  kPolicySketchBegin = 14,    // first cell
  kPolicySketchWidth = 15,    // cells of each of kSketchRows rows
  kPolicyBudget = 16,         // bytes of the group; 0: none
  kPolicyIdBytes = 17,        // share of one id in the budget
  kPolicyReservedIds = 18,    // ids that other tables cannot displace
  kPolicyDecayedWord = 19,
  kPolicyHalfLife = 20,           // of decayed counts: seconds; below 0: steps
  kPolicyCombinedWord = 21,       // of custom scores that combine_scores_ changes; 0: not kept
  kPolicyCombinedInitial = 22,    // its value for a new id
  kPolicyAdmissionHalfLife = 23,  // of counts of kAdmitFrequent, as kPolicyHalfLife; 0: none
  kPolicyColumns = 24
};

enum OnFull : int { kFullGrow = 0, kFullEvict = 1, kFullDefault = 2, kFullError = 3 };

enum Admission : int {
  kAdmitAll = 0,
  kAdmitFrequent = 1,        // counted exactly
  kAdmitFrequentSketch = 2,  // counted in a sketch
  kAdmitByChance = 3,
  kAdmitNone = 4
};

// Decision on an id that its table does not have.
enum Verdict : int {
  kVerdictInsert = 0,   // it gets a row
  kVerdictCount = 1,    // its first count is kept
  kVerdictCounted = 2,  // its count grows
  kVerdictRefuse = 3
};

// Scores of an id are words: the step of its last training lookup, then those that the group keeps.
// A bucket has word after word, each for its kBucketWidth slots.
constexpr int kStepWord = 0;
constexpr int kMaxScoreWords = 6;

constexpr int64_t kMaxFrequency = kMaxCount;
DYNEMB_HD int64_t add_frequency(int64_t frequency, int64_t occurrences) {
  const int64_t sum = frequency + occurrences;
  return sum < kMaxFrequency ? sum : kMaxFrequency;
}

// `clock` int64 [kClockHead + tables]: the step, the time in seconds, then by table the custom
// score of ids that lookups see.
enum ClockColumn : int { kClockStep = 0, kClockNow = 1, kClockHead = 2 };

// How a lookup changes the scores of the ids that it finds.
struct ScoreUpdate {
  int64_t step;
  int64_t now;
  int64_t custom;
  int64_t expires;
  int64_t decay_time;  // of an occurrence now; with decayed_word only
  bool refresh;        // whether words beside the step change
  int timestamp_word;
  int frequency_word;
  int custom_word;
  int expiry_word;
  int decayed_word;
  int combined_word;  // changed by combine_scores_ alone
  int64_t combined_initial;
};

DYNEMB_HD ScoreUpdate step_update(const int64_t* clock) {
  return {clock[kClockStep], 0, 0, 0, 0, false, 0, 0, 0, 0, 0, 0, 0};
}
// Expiry of an id that is seen now; INT64_MAX: never.
DYNEMB_HD int64_t expires_at(const int64_t* policy, const int64_t* clock) {
  const int64_t ttl = policy[kPolicyTtl];
  const int64_t now = clock[kClockNow];  // below 0 in damaged clocks
  return ttl > 0 && now < INT64_MAX - ttl ? now + ttl : INT64_MAX;
}
// `half_life`: seconds; below 0: steps.
DYNEMB_HD int64_t decay_time_now(int64_t half_life, const int64_t* clock) {
  if (half_life == INT64_MIN) return 0;  // damaged
  return half_life < 0 ? decay_time(clock[kClockStep], -half_life)
                       : decay_time(clock[kClockNow], half_life);
}
DYNEMB_HD ScoreUpdate policy_update(const int64_t* policy, const int64_t* clock, int64_t table) {
  ScoreUpdate update;
  update.step = clock[kClockStep];
  update.now = clock[kClockNow];
  update.custom = clock[kClockHead + table];
  update.expires = expires_at(policy, clock);
  update.timestamp_word = static_cast<int>(policy[kPolicyTimestampWord]);
  update.frequency_word = static_cast<int>(policy[kPolicyFrequencyWord]);
  update.custom_word = static_cast<int>(policy[kPolicyCustomWord]);
  update.expiry_word = static_cast<int>(policy[kPolicyExpiryWord]);
  update.decayed_word = static_cast<int>(policy[kPolicyDecayedWord]);
  update.combined_word = static_cast<int>(policy[kPolicyCombinedWord]);
  update.combined_initial = policy[kPolicyCombinedInitial];
  update.decay_time = update.decayed_word != 0 ? decay_time_now(policy[kPolicyHalfLife], clock) : 0;
  const int words = update.timestamp_word | update.frequency_word | update.custom_word |
                    update.expiry_word | update.decayed_word;
  update.refresh = words != 0 && policy[kPolicyUpdatesScores] != 0;
  return update;
}

// Initial value of word `word` of a new id with so many `occurrences` in its call.
DYNEMB_HD int64_t new_score(const ScoreUpdate& update, int word, int64_t occurrences) {
  if (word == kStepWord) return update.step;
  if (word == update.timestamp_word) return update.now;
  if (word == update.frequency_word) return add_frequency(0, occurrences);
  if (word == update.custom_word) return update.custom;
  if (word == update.expiry_word) return update.expires;
  if (word == update.combined_word) return update.combined_initial;
  if (word == update.decayed_word) return decayed_occurrences(update.decay_time, occurrences);
  return 0;
}

// -- new ids of several features -----------------------------------------------------------------

// If several features with policies of their own bring one new id in a call, the id gets what a
// known id would get from them: the largest of their expiries. The least of their thresholds admits
// it. Both are kept as the largest of ranks, 0 before the first feature, so neither the order of
// features nor that of threads matters.

// A feature that does not update scores sets the expiry only if no other feature does.
DYNEMB_HD uint64_t expiry_rank(const int64_t* policy, const int64_t* clock) {
  const auto expires = static_cast<uint64_t>(expires_at(policy, clock));
  return policy[kPolicyUpdatesScores] != 0 ? expires | (uint64_t{1} << 63) : expires;
}
DYNEMB_HD int64_t ranked_expiry(uint64_t rank) { return static_cast<int64_t>(rank << 1 >> 1); }

DYNEMB_HD uint64_t threshold_rank(const int64_t* policy) {
  return static_cast<uint64_t>(INT64_MAX) - static_cast<uint64_t>(policy[kPolicyThreshold]);
}
DYNEMB_HD int64_t ranked_threshold(uint64_t rank) {
  return static_cast<int64_t>(static_cast<uint64_t>(INT64_MAX) - rank);
}

// -- admission -----------------------------------------------------------------------------------

// The same draw for an id, however often a step sees it.
DYNEMB_HD bool admitted_by_chance(int64_t seed, int64_t id, int64_t step, int64_t chance) {
  const uint64_t s = static_cast<uint64_t>(seed);
  const uint64_t i = static_cast<uint64_t>(id);
  const Philox4 words = philox4x32(static_cast<uint32_t>(i), static_cast<uint32_t>(i >> 32),
                                   static_cast<uint32_t>(step), 1, static_cast<uint32_t>(s),
                                   static_cast<uint32_t>(s >> 32));
  return static_cast<int64_t>(words.word[0]) < chance;
}

// Count-min sketch (Cormode, Muthukrishnan 2005) with conservative update (Estan, Varghese 2002):
// a count is the least of its cells, never too small; cells grow only as far as the new count.
// Counts of a call are all taken before cells change, so that the order of ids does not matter.
constexpr int kSketchRows = 4;
constexpr int32_t kMaxSketchCount = INT32_MAX;

DYNEMB_HD int64_t sketch_cell(int64_t id, uint64_t salt, int row, int64_t width) {
  const uint64_t mixed = fmix64(static_cast<uint64_t>(id) ^ salt) +
                         static_cast<uint64_t>(row + 1) * 0x9e3779b97f4a7c15ULL;
  return row * width + bucket_of(fmix64(mixed), width);
}
DYNEMB_HD int32_t add_sketch_count(int32_t count, int64_t occurrences) {
  const int64_t sum = count + occurrences;
  return sum < kMaxSketchCount ? static_cast<int32_t>(sum) : kMaxSketchCount;
}

// Verdict on an admitted id without room: its occurrences are counted as if it had not been
// admitted, so it gets a row as soon as it is seen and there is room. `counted`: it has an exact
// counter.
DYNEMB_HD Verdict verdict_without_room(const int64_t* policy, bool counted, int64_t occurrences) {
  if (occurrences == 0) return kVerdictRefuse;
  if (policy[kPolicyAdmission] == kAdmitFrequentSketch) return kVerdictCounted;
  if (policy[kPolicyAdmission] != kAdmitFrequent) return kVerdictRefuse;
  return counted ? kVerdictCounted : kVerdictCount;
}

// Whether an admitted id needs a new exact counter if it gets no room. If a full table grows or
// raises, every id of the call has room.
DYNEMB_HD bool may_need_counter(const int64_t* policy, bool counted, int64_t occurrences) {
  const bool refuses = policy[kPolicyOnFull] == kFullEvict || policy[kPolicyOnFull] == kFullDefault;
  return refuses && verdict_without_room(policy, counted, occurrences) == kVerdictCount;
}

// -- room ----------------------------------------------------------------------------------------

// Bytes of ids, at most kMostBytes: sums over tables stay far from overflow.
constexpr int64_t kMostBytes = int64_t{1} << 48;
DYNEMB_HD int64_t bytes_of_ids(int64_t ids, int64_t id_bytes) {
  return id_bytes > 0 && ids > kMostBytes / id_bytes ? kMostBytes : ids * id_bytes;
}

// Bytes of a group's budget that a table occupies with its ids, or that are reserved for it.
DYNEMB_HD int64_t budget_share(const int64_t* policy, int64_t size) {
  const int64_t ids = size > policy[kPolicyReservedIds] ? size : policy[kPolicyReservedIds];
  return bytes_of_ids(ids, policy[kPolicyIdBytes]);
}

// Number of `incoming` new ids that fit the table's capacity without an eviction.
DYNEMB_HD int64_t ids_within_capacity(const int64_t* policy, int64_t size, int64_t incoming) {
  if (policy[kPolicyCapacity] == 0 || policy[kPolicyOnFull] == kFullGrow) return incoming;
  const int64_t left = policy[kPolicyCapacity] - size;
  if (left >= incoming) return incoming;
  return left > 0 ? left : 0;
}

// Number of new ids that fit the table's reservation.
DYNEMB_HD int64_t reserved_ids(const int64_t* policy, int64_t size) {
  const int64_t left = policy[kPolicyReservedIds] - size;
  return left > 0 ? left : 0;
}

// Bytes that the new ids of a table need from the remaining budget.
DYNEMB_HD int64_t budget_demand(const int64_t* policy, int64_t size, int64_t incoming) {
  const int64_t ids = ids_within_capacity(policy, size, incoming) - reserved_ids(policy, size);
  return ids > 0 ? bytes_of_ids(ids, policy[kPolicyIdBytes]) : 0;
}

// The most that each table may take of the `left` bytes, so that all together take at most `left`.
// Small demands leave the rest to the others (max-min fairness). `demand(t)` is in bytes.
template <class Demand>
DYNEMB_HD int64_t budget_level(int64_t left, int64_t tables, const Demand& demand) {
  if (left <= 0) return 0;
  int64_t level = left / tables;
  for (;;) {
    int64_t spare = left;
    int64_t unsatisfied = 0;
    for (int64_t t = 0; t < tables; ++t) {
      const int64_t wanted = demand(t);
      spare -= wanted < level ? wanted : level;
      unsatisfied += wanted > level;
    }
    if (unsatisfied == 0 || spare < unsatisfied) return level;
    level += spare / unsatisfied;
  }
}

// Number of `incoming` new ids that get rows without an eviction. `level` is the most that the
// table may take of the remaining budget.
DYNEMB_HD int64_t ids_with_room(const int64_t* policy, int64_t size, int64_t incoming,
                                int64_t level) {
  const int64_t room = ids_within_capacity(policy, size, incoming);
  if (policy[kPolicyBudget] == 0) return room;
  const int64_t most = reserved_ids(policy, size) + level / policy[kPolicyIdBytes];
  return most < room ? most : room;
}

// -- eviction ------------------------------------------------------------------------------------

// A new id without a row looks for a victim in this many buckets from its first candidate on: the
// least score, then the least recent, then the least id. Rows are not bound to buckets, so the new
// id need not take the victim's slot. (benchmarks/notes/eviction.md has hit rates by number of
// buckets.)
constexpr int kVictimBuckets = 8;

// Small indexes are searched as a whole, so that a full table refuses an id only if every other id
// is protected. Eight of 16 buckets would hold no id of a table of capacity 1 half of the time.
// (benchmarks/notes/eviction.md has refusals and cost by size: larger tables refuse ids only if a
// call replaces nearly all of theirs, and 64 buckets double the cost of a new id.)
constexpr int64_t kWholeIndexBuckets = 32;
DYNEMB_HD int victim_buckets(int64_t bucket_count) {
  return bucket_count <= kWholeIndexBuckets ? static_cast<int>(bucket_count) : kVictimBuckets;
}

struct VictimRank {
  int64_t score;
  int64_t step;
  int64_t id;
};
template <class Rank>  // VictimRank, or the same of several slots at once: then a mask
DYNEMB_HD auto goes_before(const Rank& a, const Rank& b) {
  return (a.score < b.score) |
         ((a.score == b.score) & ((a.step < b.step) | ((a.step == b.step) & (a.id < b.id))));
}

// New ids claim victims as entries claim slots (core/index/claim.h): a slot keeps the earliest
// claim, and a rejected id claims the next best victim. A claim takes the place of the victim's
// step word and keeps its low half: claims are negative, earlier ones are less.
DYNEMB_HD int64_t make_eviction_claim(int64_t order, int64_t step) {
  return INT64_MIN + (order << 32) +
         static_cast<int64_t>(static_cast<uint32_t>(static_cast<uint64_t>(step)));
}
DYNEMB_HD bool is_eviction_claim(int64_t word) { return word < 0; }
DYNEMB_HD int64_t eviction_claim_order(int64_t word) { return (word - INT64_MIN) >> 32; }
// The step in a step word, claimed or not; it is at most 2^32 steps old.
DYNEMB_HD int64_t step_of(int64_t word, int64_t clock) {
  if (!is_eviction_claim(word)) return word;
  const uint32_t age = static_cast<uint32_t>(static_cast<uint64_t>(clock)) -
                       static_cast<uint32_t>(static_cast<uint64_t>(word));
  return clock - static_cast<int64_t>(age);
}

// `evicted` int64 [1 + records, kEvictedColumns]: first the number of records and of lost ones,
// then table, id, handle and score of each.
enum EvictedColumn : int {
  kEvictedTable = 0,
  kEvictedId = 1,
  kEvictedHandle = 2,
  kEvictedScore = 3,
  kEvictedColumns = 4
};
enum EvictedHead : int { kEvictedRecords = 0, kEvictedLost = 1 };

}  // namespace dynemb
