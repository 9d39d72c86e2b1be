// The plan of an insertion or erasure: what one block decides on the device between two kernels, so
// that the host never has to know how many ids are new.
#pragma once

#include "cuda/index/tensors.cuh"

namespace dynemb::cuda {

// int64 words in scratch memory, cleared before a call.
struct Plan {
  int64_t* head;  // PlanHead
  // [features]
  int64_t* feature_count;     // distinct new (or erased) ids that take (or free) a row
  int64_t* feature_first;     // rank of the feature's first one
  int64_t* feature_in_table;  // how many of the same table come in earlier features
  int64_t* feature_row;       // how many rows of the same slab go to earlier features
  // [slabs]
  int64_t* slab_free;  // free rows before the call
  int64_t* slab_next;  // next row before the call
  // [tables]
  int64_t* missed;        // occurrences of ids that are not there
  int64_t* padding;       // occurrences of the padding id
  int64_t* added;         // new ids that get a row that no other id has
  int64_t* evicted;       // new ids that need a victim
  int64_t* rejected;      // new ids for which there is no row
  int64_t* not_admitted;  // new ids that were not admitted
  int64_t* counted;       // counter tables: ids that are counted for the first time
  int64_t* admitted;      // counter tables: ids that are counted no longer, if there is room
  int64_t* uncounted;     // counter tables: ids that are counted first if there is no room
  int64_t* victims;       // ids that have been evicted
  int64_t* old_buckets;   // bucket count before a rehash; 0: none
  int64_t* old_begin;     // [tables + 1] first of its buckets among all that are rehashed
};

enum PlanHead : int {
  kPlanTouched = 0,   // an id was found that the plan must deal with
  kPlanInvalid = 1,   // offsets are wrong: nothing is changed
  kPlanAccepted = 2,  // ids are inserted, as far as policies let them in
  kPlanTotal = 3,     // distinct new ids that are to be placed (or erased); 0 if refused
  kPlanRehash = 4,    // buckets that are rehashed
  kPlanEvictors = 5,  // new ids that need a victim
  kPlanLogBegin = 6,  // records in the log of evicted ids before the call
  kPlanNoRoom = 7,    // new ids that need a victim or are refused
  kPlanHeadWords = 8
};

constexpr int64_t kPlanFeatureArrays = 4;
constexpr int64_t kPlanSlabArrays = 2;
constexpr int64_t kPlanTableArrays = 12;

inline int64_t plan_words(int64_t features, int64_t tables, int64_t slabs) {
  return kPlanHeadWords + kPlanFeatureArrays * features + kPlanSlabArrays * slabs +
         kPlanTableArrays * tables + 1;
}
inline Plan make_plan(int64_t* words, int64_t features, int64_t tables, int64_t slabs) {
  const auto take = [&](int64_t count) {
    int64_t* array = words;
    words += count;
    return array;
  };
  Plan plan;
  plan.head = take(kPlanHeadWords);
  for (int64_t** array :
       {&plan.feature_count, &plan.feature_first, &plan.feature_in_table, &plan.feature_row}) {
    *array = take(features);
  }
  for (int64_t** array : {&plan.slab_free, &plan.slab_next}) *array = take(slabs);
  for (int64_t** array :
       {&plan.missed, &plan.padding, &plan.added, &plan.evicted, &plan.rejected, &plan.not_admitted,
        &plan.counted, &plan.admitted, &plan.uncounted, &plan.victims, &plan.old_buckets}) {
    *array = take(tables);
  }
  plan.old_begin = take(tables + 1);
  return plan;
}

// Positions are counted in blocks of this many; a block's count is one word.
constexpr int kRankBlock = 256;

// Counts the first occurrences among a block's positions, by block and by feature. All threads of a
// block of kRankBlock must call it.
__device__ __forceinline__ void count_firsts(const Plan& plan, bool first, int64_t feature,
                                             int32_t* block_counts) {
  const int count = __syncthreads_count(first);
  if (threadIdx.x == 0) block_counts[blockIdx.x] = count;
  count_by_key(first, feature, plan.feature_count);
}

// How many of the block's threads before this one are flagged. All threads must call it.
__device__ __forceinline__ int rank_in_block(bool flag) {
  __shared__ int warp_counts[kRankBlock / 32];
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const unsigned flagged = __ballot_sync(0xffffffffu, flag);
  if (lane == 0) warp_counts[warp] = __popc(flagged);
  __syncthreads();
  int before = __popc(flagged & ((1u << lane) - 1u));
  for (int w = 0; w < warp; ++w) before += warp_counts[w];
  __syncthreads();
  return before;
}

// Exclusive prefix sums of `counts` in place, by one block of kPlanBlock threads; returns the
// total.
constexpr int kPlanBlock = 1024;
__device__ __forceinline__ int64_t scan_counts(int32_t* counts, int64_t blocks) {
  __shared__ int64_t partial[kPlanBlock];
  const int64_t each = (blocks + kPlanBlock - 1) / kPlanBlock;
  const int64_t begin = min(static_cast<int64_t>(threadIdx.x) * each, blocks);
  const int64_t end = min(begin + each, blocks);
  int64_t sum = 0;
  for (int64_t i = begin; i < end; ++i) sum += counts[i];
  partial[threadIdx.x] = sum;
  __syncthreads();
  for (int distance = 1; distance < kPlanBlock; distance *= 2) {
    const int64_t left =
        static_cast<int>(threadIdx.x) >= distance ? partial[threadIdx.x - distance] : 0;
    __syncthreads();
    partial[threadIdx.x] += left;
    __syncthreads();
  }
  int64_t before = partial[threadIdx.x] - sum;
  for (int64_t i = begin; i < end; ++i) {
    const int32_t count = counts[i];
    counts[i] = static_cast<int32_t>(before);
    before += count;
  }
  const int64_t total = partial[kPlanBlock - 1];
  __syncthreads();
  return total;
}

// Whether the ids of a table have rows; those of a counter table have none.
__device__ __forceinline__ bool has_rows(const IndexArgs& index, int64_t table) {
  return index.meta_row(table)[kMetaUnscored] == 0;
}

// Ranks of the features' first ids, in all and within their slab. One block.
__device__ __forceinline__ void rank_features(const IndexArgs& index, const FeatureArgs& features,
                                              const Plan& plan) {
  for (int64_t f = threadIdx.x; f < features.features; f += blockDim.x) {
    const int64_t slab = index.meta_row(features.table[f])[kMetaSlab];
    int64_t first = 0;
    int64_t row = 0;
    for (int64_t g = 0; g < f; ++g) {
      const int64_t count = plan.feature_count[g];
      first += count;
      const int64_t other = features.table[g];
      if (has_rows(index, other) && index.meta_row(other)[kMetaSlab] == slab) row += count;
    }
    plan.feature_first[f] = first;
    plan.feature_row[f] = row;
  }
}

// Distinct new (or erased) ids of one table, and of one slab.
__device__ __forceinline__ int64_t table_total(const FeatureArgs& features, const Plan& plan,
                                               int64_t table) {
  int64_t total = 0;
  for (int64_t f = 0; f < features.features; ++f) {
    if (features.table[f] == table) total += plan.feature_count[f];
  }
  return total;
}
__device__ __forceinline__ int64_t slab_total(const IndexArgs& index, const FeatureArgs& features,
                                              const Plan& plan, int64_t slab) {
  int64_t total = 0;
  for (int64_t f = 0; f < features.features; ++f) {
    const int64_t t = features.table[f];
    if (has_rows(index, t) && index.meta_row(t)[kMetaSlab] == slab) total += plan.feature_count[f];
  }
  return total;
}

}  // namespace dynemb::cuda
