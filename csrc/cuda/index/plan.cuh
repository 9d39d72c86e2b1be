// The plan of an insertion or erasure: one block makes it on the device between two kernels, so
// that the host need not know the number of new ids.
#pragma once

#include "cuda/index/tensors.cuh"

namespace dynemb::cuda {

// int64 words in scratch memory, cleared before a call.
struct Plan {
  int64_t* head;  // PlanHead
  // [features]
  int64_t* feature_count;     // distinct new (or erased) ids that take (or free) a row
  int64_t* feature_first;     // rank of the feature's first one
  int64_t* feature_in_table;  // number of the same table's in earlier features
  int64_t* feature_row;       // number of the same slab's rows for earlier features
  // [slabs]
  int64_t* slab_free;  // free rows before the call
  int64_t* slab_next;  // next row before the call
  int64_t* slab_rows;  // rows that the call takes (or frees)
  // [tables]
  int64_t* ids;           // occurrences of ids, padding among them
  int64_t* missed;        // occurrences of missing ids
  int64_t* padding;       // occurrences of the padding id
  int64_t* added;         // new ids that get a free row
  int64_t* evicted;       // new ids that need a victim
  int64_t* rejected;      // new ids without a row
  int64_t* not_admitted;  // new ids that were not admitted
  int64_t* counted;       // counter tables: ids that are counted for the first time
  int64_t* admitted;      // counter tables: ids that need no counter any more, if they get a row
  int64_t* uncounted;     // counter tables: ids that are counted first if they get no row
  int64_t* victims;       // ids that have been evicted
  int64_t* old_buckets;   // bucket count before a rehash; 0: none
  int64_t* old_begin;     // [tables + 1] first of its buckets among all that are rehashed
};

enum PlanHead : int {
  kPlanTouched = 0,   // an id was found that the plan is about
  kPlanInvalid = 1,   // offsets are wrong: nothing is changed
  kPlanAccepted = 2,  // ids are inserted, as far as policies admit them
  kPlanTotal = 3,     // distinct new ids to be placed (or erased); 0 if refused
  kPlanRehash = 4,    // buckets that are rehashed
  kPlanEvictors = 5,  // new ids that need a victim
  kPlanLogBegin = 6,  // records in the log of evicted ids before the call
  kPlanNoRoom = 7,    // new ids that need a victim or are refused
  kPlanHeadWords = 8
};

// Many threads do so, and write the same.
__device__ __forceinline__ void note_in_plan(const Plan& plan, PlanHead what) {
  store_racing(plan.head + what, int64_t{1});
}

constexpr int64_t kPlanFeatureArrays = 4;
constexpr int64_t kPlanSlabArrays = 3;
constexpr int64_t kPlanTableArrays = 13;

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
  for (int64_t** array : {&plan.slab_free, &plan.slab_next, &plan.slab_rows}) *array = take(slabs);
  for (int64_t** array : {&plan.ids, &plan.missed, &plan.padding, &plan.added, &plan.evicted,
                          &plan.rejected, &plan.not_admitted, &plan.counted, &plan.admitted,
                          &plan.uncounted, &plan.victims, &plan.old_buckets}) {
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

// Number of flagged threads of the block before this one. All threads must call it.
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

// The sum of the values of the threads before this one, and of all. All threads of a block of
// kPlanBlock must call it.
struct BlockSum {
  int64_t before;
  int64_t total;
};
__device__ __forceinline__ BlockSum sum_in_block(int64_t value) {
  constexpr int kWarps = kPlanBlock / 32;
  static_assert(kWarps == 32, "one warp sums the others");
  __shared__ int64_t warp_sums[kWarps];
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const auto sum_in_warp = [&](int64_t sum) {
    for (int distance = 1; distance < 32; distance *= 2) {
      const int64_t left = __shfl_up_sync(0xffffffffu, sum, static_cast<unsigned>(distance));
      if (lane >= distance) sum += left;
    }
    return sum;
  };
  const int64_t sum = sum_in_warp(value);
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  if (warp == 0) warp_sums[lane] = sum_in_warp(warp_sums[lane]);
  __syncthreads();
  const BlockSum result{(warp > 0 ? warp_sums[warp - 1] : 0) + sum - value, warp_sums[kWarps - 1]};
  __syncthreads();
  return result;
}

// Calls write(i, sum of the values before i) for all i below `count`; returns the sum of all. All
// threads of a block of kPlanBlock must call it.
template <class Value, class Write>
__device__ __forceinline__ int64_t running_sums(int64_t count, const Value& value,
                                                const Write& write) {
  int64_t before = 0;
  for (int64_t first = 0; first < count; first += kPlanBlock) {
    const int64_t i = first + static_cast<int64_t>(threadIdx.x);
    const BlockSum sum = sum_in_block(i < count ? value(i) : 0);
    if (i < count) write(i, before + sum.before);
    before += sum.total;
  }
  return before;
}

__device__ __forceinline__ void add_to(int64_t* total, int64_t value) {
  if (value == 0) return;
  atomicAdd(reinterpret_cast<unsigned long long*>(total), static_cast<unsigned long long>(value));
}

// Up to so many features or tables are handled one by one; more, by running sums.
constexpr int64_t kFew = 32;

// plan.feature_row: the sum of value(g) over the earlier features of the same slab. All threads of
// the block. A slab takes a pass over the features: a group has few.
template <class Value>
__device__ __forceinline__ void rank_in_slabs(const IndexArgs& index, const FeatureArgs& features,
                                              const Plan& plan, int64_t slabs, const Value& value) {
  const auto slab_of = [&](int64_t f) { return index.meta_row(features.table[f])[kMetaSlab]; };
  if (features.features <= kFew) {
    for (int64_t f = threadIdx.x; f < features.features; f += blockDim.x) {
      int64_t rows = 0;
      for (int64_t g = 0; g < f; ++g) rows += slab_of(g) == slab_of(f) ? value(g) : 0;
      plan.feature_row[f] = rows;
    }
    return;
  }
  for (int64_t s = 0; s < slabs; ++s) {
    running_sums(
        features.features, [&](int64_t f) { return slab_of(f) == s ? value(f) : 0; },
        [&](int64_t f, int64_t before) {
          if (slab_of(f) == s) plan.feature_row[f] = before;
        });
  }
}

// Distinct new (or erased) ids of each table, into plan.added, and ranks of the features' first
// ids, in all and within their slab. All threads of a block of kPlanBlock.
__device__ __forceinline__ void rank_features(const IndexArgs& index, const FeatureArgs& features,
                                              const Plan& plan, int64_t slabs) {
  for (int64_t f = threadIdx.x; f < features.features; f += blockDim.x) {
    add_to(plan.added + features.table[f], plan.feature_count[f]);
  }
  rank_in_slabs(index, features, plan, slabs, [&](int64_t f) {
    return has_rows(index, features.table[f]) ? plan.feature_count[f] : 0;
  });
  if (features.features <= kFew) {
    for (int64_t f = threadIdx.x; f < features.features; f += blockDim.x) {
      int64_t first = 0;
      for (int64_t g = 0; g < f; ++g) first += plan.feature_count[g];
      plan.feature_first[f] = first;
    }
  } else {
    running_sums(
        features.features, [&](int64_t f) { return plan.feature_count[f]; },
        [&](int64_t f, int64_t before) { plan.feature_first[f] = before; });
  }
  __syncthreads();
}

}  // namespace dynemb::cuda
