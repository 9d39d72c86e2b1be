#include "cuda/index/admission.h"

namespace dynemb::cuda {
namespace {

struct Decision {
  int verdict;
  int64_t count;  // NewIds::counts
};

// The least of an id's cells.
__device__ __forceinline__ int32_t sketch_count(const int64_t* policy, uint64_t salt,
                                                const int32_t* sketch, int64_t id) {
  int32_t count = kMaxSketchCount;
#pragma unroll
  for (int row = 0; row < kSketchRows; ++row) {
    const int64_t cell = sketch_cell(id, salt, row, policy[kPolicySketchWidth]);
    count = min(count, sketch[policy[kPolicySketchBegin] + cell]);
  }
  return count;
}

__device__ __forceinline__ Decision decide(const IndexArgs& index, const PolicyArgs& policies,
                                           const int32_t* sketch, int64_t t, const int64_t* policy,
                                           int64_t threshold, int64_t id, int64_t occurrences) {
  const int64_t seed = index.meta_row(t)[kMetaSeed];
  switch (policy[kPolicyAdmission]) {
    case kAdmitFrequent: {
      const FoundSlot at = find_slot(table_view(index, policy[kPolicyCounterTable]), id);
      const bool known = at.stored != 0;
      const int64_t place = known ? pack_place({at.bucket, at.slot, at.never_full}) : -1;
      // without a counter `stored` is 0
      const int64_t time = waiting_time(policy, policies.clock);
      const int64_t count = add_waiting(policy, time, at.stored, occurrences);
      if (count >= least_admitted(policy, time, threshold)) return {kVerdictInsert, place};
      return {verdict_without_room(policy, known, occurrences), place};
    }
    case kAdmitFrequentSketch: {
      const int32_t count = sketch_count(policy, bucket_salt(seed), sketch, id);
      if (add_sketch_count(count, occurrences) >= threshold) return {kVerdictInsert, count};
      return {verdict_without_room(policy, false, occurrences), count};
    }
    case kAdmitByChance:
      return {admitted_by_chance(seed, id, policies.clock[kClockStep], policy[kPolicyChance])
                  ? kVerdictInsert
                  : kVerdictRefuse,
              -1};
    case kAdmitNone:
      return {kVerdictRefuse, -1};
    default:
      return {kVerdictInsert, -1};
  }
}

// Whether the verdict puts an id into a table.
__device__ __forceinline__ bool is_placed(int verdict) {
  return verdict == kVerdictInsert || verdict == kVerdictCount;
}

// A thread per id: reads 8 bytes in order, and 4 at random for a miss. For a new id 9 bytes more
// are written in order, and its count is read: one random 64-byte line, or four cells of 4 bytes.
__global__ void decide_new(IndexArgs index, FeatureArgs features, PolicyArgs policies,
                           DedupeTable dedupe, Plan plan, NewIds new_ids, bool admit,
                           const int32_t* sketch, const int64_t* handles, int32_t* insert_counts,
                           int32_t* placed_counts) {
  if (plan.head[kPlanTouched] == 0) return;
  const int64_t i = thread_number();
  const bool first = is_first(features, dedupe, handles, i);
  int64_t f = 0;
  int64_t t = 0;
  int64_t counter_table = 0;
  bool has_counter = false;
  bool may_be_counted = false;
  int verdict = kVerdictRefuse;
  if (first) {
    f = features.feature_of(i);
    t = features.table[f];
    const int64_t* policy = policies.feature_row(f);
    const int64_t slot = kMissBase - handles[i];
    int64_t count = -1;
    if (!admit || new_ids.wanted[slot] != 0) {
      const int64_t occurrences = new_ids.occurrences[slot];
      const Decision decision =
          decide(index, policies, sketch, t, policy, new_ids.threshold(slot, policy),
                 features.ids[i], occurrences);
      verdict = decision.verdict;
      count = decision.count;
      if (policy[kPolicyAdmission] == kAdmitFrequent) {
        counter_table = policy[kPolicyCounterTable];
        has_counter = count >= 0;
        may_be_counted = may_need_counter(policy, has_counter, occurrences);
      }
    }
    new_ids.verdicts[i] = static_cast<uint8_t>(verdict);
    new_ids.counts[i] = count;
  }
  const bool inserted = first && verdict == kVerdictInsert;
  count_firsts(plan, inserted, f, insert_counts);
  const int placed = __syncthreads_count(first && is_placed(verdict));
  if (threadIdx.x == 0) placed_counts[blockIdx.x] = placed;
  count_by_key(first && !inserted, t, plan.not_admitted);
  count_by_key(first && verdict == kVerdictCount, counter_table, plan.counted);
  count_by_key(inserted && has_counter, counter_table, plan.admitted);
  count_by_key(inserted && may_be_counted, counter_table, plan.uncounted);
}

// A thread per id: reads 8 bytes in order. For a new id 17 more in order or nearly so and 4 at
// random, and 28 written in order. For an id that is or was counted a random 64-byte line, or four
// atomics of 4 bytes.
__global__ void give_admitted(PlacedIds placed, SlabArgs slabs, DedupeTable dedupe, Plan plan,
                              NewIds new_ids, int32_t* sketch, const int32_t* insert_counts,
                              const int32_t* placed_counts, int64_t* handles) {
  if (plan.head[kPlanAccepted] == 0) return;
  const IndexArgs& index = placed.index;
  const FeatureArgs& features = placed.features;
  const int64_t i = thread_number();
  const bool first = is_first(features, dedupe, handles, i);
  const int verdict =
      first ? static_cast<int>(new_ids.verdicts[i]) : static_cast<int>(kVerdictRefuse);
  const bool inserted = first && verdict == kVerdictInsert;
  const int64_t insert_rank = insert_counts[blockIdx.x] + rank_in_block(inserted);
  const int64_t order = placed_counts[blockIdx.x] + rank_in_block(first && is_placed(verdict));
  if (!first) return;
  const int64_t f = features.feature_of(i);
  const int64_t t = features.table[f];
  const int64_t* policy = placed.policies.feature_row(f);
  const int64_t slot = kMissBase - handles[i];
  const int32_t occurrences = new_ids.occurrences[slot];
  const int64_t count = new_ids.counts[i];
  const int64_t in_feature = insert_rank - plan.feature_first[f];
  const bool has_row = inserted && in_feature + plan.feature_in_table[f] < plan.added[t];
  const bool needs_victim = inserted && !has_row && plan.evicted[t] > 0;
  const bool without_room = inserted && !has_row && !needs_victim;
  const bool in_counters = policy[kPolicyAdmission] == kAdmitFrequent;
  const bool has_counter = in_counters && count >= 0;
  const bool in_sketch = policy[kPolicyAdmission] == kAdmitFrequentSketch;
  int64_t before = in_sketch && count > 0 ? count : 0;
  if (has_counter) {
    // its table has not been rehashed yet
    const int64_t counter_table = policy[kPolicyCounterTable];
    const SlotPlace place = unpack_place(count);
    int64_t& stored =
        table_view(index, counter_table).line(place.bucket)[kBucketWidth + place.slot];
    before = stored;
    if (has_row) {
      clear_counter(index, counter_table, place, plan.old_buckets[counter_table] == 0);
    } else if (verdict != kVerdictRefuse) {  // the counter of an id with a victim is cleared later
      stored =
          add_waiting(policy, waiting_time(policy, placed.policies.clock), stored, occurrences);
    }
  } else if (in_sketch && (verdict == kVerdictCounted || without_room)) {
    note_in_sketch(index, policy, t, features.ids[i],
                   add_sketch_count(static_cast<int32_t>(count), occurrences), sketch);
  }
  handles[i] = kRefusedHandle;
  if (!is_placed(verdict)) return;
  placed.positions[order] = static_cast<int32_t>(i);
  placed.occurrences[order] = static_cast<int32_t>(
      admitted_frequency(policy, before, occurrences, new_ids.threshold(slot, policy)));
  if (placed.expires != nullptr) placed.expires[order] = ranked_expiry(new_ids.expiry_ranks[slot]);
  placed.feature[order] = static_cast<int32_t>(inserted ? f : ~f);
  if (!inserted) {
    placed.stored_word[order] =
        add_waiting(policy, waiting_time(policy, placed.policies.clock), 0, occurrences);
  } else if (needs_victim) {
    placed.stored_word[order] = PlacedIds::kNeedsVictim;
  } else if (without_room) {
    placed.stored_word[order] = PlacedIds::kRefused;
    if (in_counters && !has_counter) placed.count_instead(order, f);
  } else {
    const int64_t handle =
        slabs.row_handle(plan, index.meta_row(t)[kMetaSlab], in_feature + plan.feature_row[f]);
    placed.stored_word[order] = encode_handle(handle);
    handles[i] = handle;
  }
}

}  // namespace

void decide_admission(const Call& call, const IndexArgs& index, const PolicyArgs& policies,
                      const PlannedCall& planned, const NewIds& new_ids, bool admit,
                      const int32_t* sketch, const int64_t* handles, int32_t* placed_counts) {
  call.launch(decide_new, planned.blocks * kRankBlock, kRankBlock, index, planned.features,
              policies, planned.dedupe, planned.plan, new_ids, admit, sketch, handles,
              planned.block_counts, placed_counts);
}

void give_admitted_rows(const Call& call, const SlabArgs& slabs, const PlannedCall& planned,
                        const NewIds& new_ids, int32_t* sketch, int64_t* handles,
                        const int32_t* placed_counts, const PlacedIds& placed) {
  call.launch(give_admitted, planned.blocks * kRankBlock, kRankBlock, placed, slabs, planned.dedupe,
              planned.plan, new_ids, sketch, planned.block_counts, placed_counts, handles);
}

}  // namespace dynemb::cuda
