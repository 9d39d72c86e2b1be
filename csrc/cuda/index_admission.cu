#include "cuda/index_admission.h"

namespace dynemb::cuda {
namespace {

struct Decision {
  int verdict;
  int64_t count;      // NewIds::counts
  int64_t frequency;  // of an id that is admitted
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
                                           int64_t id, int64_t occurrences) {
  const int64_t seed = index.meta_row(t)[kMetaSeed];
  switch (policy[kPolicyAdmission]) {
    case kAdmitFrequent: {
      const FoundSlot at = find_slot(table_view(index, policy[kPolicyCounterTable]), id);
      const bool known = at.stored != 0;
      const int64_t place = known ? pack_place({at.bucket, at.slot, at.never_full}) : -1;
      // without a counter `stored` is 0
      const int64_t sum = at.stored + occurrences;
      if (sum >= policy[kPolicyThreshold]) return {kVerdictInsert, place, counted_frequency(sum)};
      if (occurrences == 0) return {kVerdictRefuse, place, 0};
      return {known ? kVerdictCounted : kVerdictCount, place, 0};
    }
    case kAdmitFrequentSketch: {
      const int32_t count = sketch_count(policy, bucket_salt(seed), sketch, id);
      const int32_t sum = add_sketch_count(count, occurrences);
      if (sum >= policy[kPolicyThreshold]) return {kVerdictInsert, count, counted_frequency(sum)};
      return {occurrences > 0 ? kVerdictCounted : kVerdictRefuse, count, 0};
    }
    case kAdmitByChance:
      return {admitted_by_chance(seed, id, policies.clock[kClockStep], policy[kPolicyChance])
                  ? kVerdictInsert
                  : kVerdictRefuse,
              -1, occurrences};
    case kAdmitNone:
      return {kVerdictRefuse, -1, 0};
    default:
      return {kVerdictInsert, -1, occurrences};
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
  int verdict = kVerdictRefuse;
  if (first) {
    f = features.features == 1 ? 0 : features.feature_of(i);
    t = features.table[f];
    const int64_t* policy = policies.feature_row(f);
    const int64_t slot = kMissBase - handles[i];
    int64_t count = -1;
    if (!admit || new_ids.wanted[slot] != 0) {
      const Decision decision =
          decide(index, policies, sketch, t, policy, features.ids[i], new_ids.occurrences[slot]);
      verdict = decision.verdict;
      count = decision.count;
      if (verdict == kVerdictInsert) {  // no other thread has this slot's first occurrence
        new_ids.occurrences[slot] = static_cast<int32_t>(decision.frequency);
      }
      if (policy[kPolicyAdmission] == kAdmitFrequent) {
        counter_table = policy[kPolicyCounterTable];
        has_counter = count >= 0;
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
}

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

// Counts the id once more, or forgets its count if it gets a row. Its table has not been rehashed.
__device__ __forceinline__ void note_in_counters(const IndexArgs& index, const Plan& plan,
                                                 int64_t counter_table, int verdict, int64_t place,
                                                 int64_t occurrences) {
  const TableView counters = table_view(index, counter_table);
  const SlotPlace at = unpack_place(place);
  if (verdict == kVerdictCounted) {
    int64_t& stored = counters.line(at.bucket)[kBucketWidth + at.slot];
    stored = add_frequency(stored, occurrences);
  } else if (verdict == kVerdictInsert) {
    // a rehash drops the tombstones; the plan has counted it already
    if (clear_slot(counters, at) && plan.old_buckets[counter_table] == 0) {
      atomicAdd(
          reinterpret_cast<unsigned long long*>(index.table_row(counter_table) + kTableTombstones),
          1ULL);
    }
  }
}

// A thread per id: reads 8 bytes in order. For a new id 17 more in order or nearly so and 4 at
// random, and 28 written in order; for one that is or was counted a random 64-byte line, or four
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
  const int64_t f = features.features == 1 ? 0 : features.feature_of(i);
  const int64_t t = features.table[f];
  const int64_t* policy = placed.policies.feature_row(f);
  const int32_t occurrences = new_ids.occurrences[kMissBase - handles[i]];
  const int64_t count = new_ids.counts[i];
  if (policy[kPolicyAdmission] == kAdmitFrequent && count >= 0) {
    note_in_counters(index, plan, policy[kPolicyCounterTable], verdict, count, occurrences);
  } else if (policy[kPolicyAdmission] == kAdmitFrequentSketch && verdict == kVerdictCounted) {
    note_in_sketch(index, policy, t, features.ids[i],
                   add_sketch_count(static_cast<int32_t>(count), occurrences), sketch);
  }
  handles[i] = kRefusedHandle;
  if (!is_placed(verdict)) return;
  placed.positions[order] = static_cast<int32_t>(i);
  placed.occurrences[order] = occurrences;
  placed.feature[order] = static_cast<int32_t>(inserted ? f : ~f);
  if (!inserted) {
    placed.stored_word[order] = occurrences;
    return;
  }
  const int64_t in_feature = insert_rank - plan.feature_first[f];
  if (in_feature + plan.feature_in_table[f] >= plan.added[t]) {
    placed.stored_word[order] = plan.evicted[t] > 0 ? PlacedIds::kNeedsVictim : PlacedIds::kRefused;
    return;
  }
  const int64_t handle =
      slabs.row_handle(plan, index.meta_row(t)[kMetaSlab], in_feature + plan.feature_row[f]);
  placed.stored_word[order] = encode_handle(handle);
  handles[i] = handle;
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
