#include "core/index/row_allocation.h"
#include "cuda/index/insert_plan.h"

namespace dynemb::cuda {
namespace {

struct PlanJob {
  IndexArgs index;
  FeatureArgs features;
  const int64_t* feature_order;  // see PlannedCall
  PolicyArgs policies;
  SlabArgs slabs;
  Plan plan;
  SharedWords shared;
  ErrorSink errors;
  InsertionRoom room;
  int32_t* insert_counts;
  int32_t* placed_counts;
  int64_t blocks;
};

// Divides the new ids of a table, plan.added so far, into those that get a row, need a victim, or
// are refused. `level`: the most that it may take of the group's remaining budget. false: the call
// is an error.
__device__ bool divide_new_ids(const PlanJob& job, int64_t t, int64_t level) {
  const Plan& plan = job.plan;
  const int64_t* policy = job.policies.row(t);
  const int64_t incoming = plan.added[t];
  const int64_t added = ids_with_room(policy, job.index.table_row(t)[kTableSize], incoming, level);
  const int64_t rest = incoming - added;
  const bool evicts = policy[kPolicyOnFull] == kFullEvict;
  plan.added[t] = added;
  plan.evicted[t] = evicts ? rest : 0;
  plan.rejected[t] = evicts ? 0 : rest;
  atomicAdd(reinterpret_cast<unsigned long long*>(plan.head + kPlanNoRoom),
            static_cast<unsigned long long>(rest));
  if (rest == 0 || policy[kPolicyOnFull] != kFullError) return true;
  job.errors.report(kErrorFull, t);
  return false;
}

// budget_level by all threads of the block.
template <class Demand>
__device__ int64_t budget_level_in_block(int64_t left, int64_t tables, const Demand& demand) {
  if (left <= 0) return 0;
  const auto sum = [&](const auto& value) {
    return running_sums(tables, value, [](int64_t, int64_t) {});
  };
  int64_t level = left / tables;
  for (;;) {
    const int64_t spare = left - sum([&](int64_t t) { return min(demand(t), level); });
    const int64_t unsatisfied = sum([&](int64_t t) { return int64_t{demand(t) > level}; });
    if (unsatisfied == 0 || spare < unsatisfied) return level;
    level += spare / unsatisfied;
  }
}

// divide_new_ids for all tables. All threads of the block.
__device__ void plan_room(const PlanJob& job, int* refused) {
  __shared__ long long budget;
  __shared__ int64_t few_level;
  const int64_t tables = job.index.table_count;
  if (threadIdx.x == 0) budget = 0;
  __syncthreads();
  for (int64_t t = threadIdx.x; t < tables; t += blockDim.x) {
    const int64_t own = job.policies.row(t)[kPolicyBudget];
    if (own > 0) atomicMax(&budget, static_cast<long long>(own));
  }
  __syncthreads();
  const bool limited = budget > 0;
  __syncthreads();
  for (int64_t t = threadIdx.x; limited && t < tables; t += blockDim.x) {
    const int64_t share = budget_share(job.policies.row(t), job.index.table_row(t)[kTableSize]);
    atomicAdd(reinterpret_cast<unsigned long long*>(&budget),
              static_cast<unsigned long long>(-share));
  }
  __syncthreads();
  const auto demand = [&](int64_t t) {
    return budget_demand(job.policies.row(t), job.index.table_row(t)[kTableSize],
                         job.plan.added[t]);
  };
  int64_t level = 0;
  if (limited && tables > kFew) {
    level = budget_level_in_block(budget, tables, demand);
  } else if (limited) {
    if (threadIdx.x == 0) few_level = budget_level(budget, tables, demand);
    __syncthreads();
    level = few_level;
  }
  __syncthreads();
  for (int64_t t = threadIdx.x; t < tables; t += blockDim.x) {
    if (!divide_new_ids(job, t, level)) atomicExch(refused, 1);
  }
  __syncthreads();
}

// For each feature, the number of new ids of its table in earlier features. All threads of the
// block.
__device__ void rank_in_tables(const PlanJob& job) {
  const FeatureArgs& features = job.features;
  const Plan& plan = job.plan;
  if (job.feature_order == nullptr) return;  // tables have one feature each, and the plan is zeros
  if (features.features <= kFew) {
    for (int64_t f = threadIdx.x; f < features.features; f += blockDim.x) {
      int64_t before = 0;
      for (int64_t g = 0; g < f; ++g) {
        if (features.table[g] == features.table[f]) before += plan.feature_count[g];
      }
      plan.feature_in_table[f] = before;
    }
    return;
  }
  const int64_t* order = job.feature_order;
  int64_t* table_begin = plan.old_begin;  // not used yet
  running_sums(
      features.features, [&](int64_t i) { return plan.feature_count[order[i]]; },
      [&](int64_t i, int64_t before) {
        plan.feature_in_table[order[i]] = before;
        const int64_t t = features.table[order[i]];
        if (i == 0 || features.table[order[i - 1]] != t) table_begin[t] = before;
      });
  __syncthreads();
  for (int64_t f = threadIdx.x; f < features.features; f += blockDim.x) {
    plan.feature_in_table[f] -= table_begin[features.table[f]];
  }
}

// Where each feature's new ids begin among those of their table, and its rows among those of their
// slab: a table's first ids get rows. All threads of the block.
__device__ void rank_rows(const PlanJob& job) {
  const Plan& plan = job.plan;
  rank_in_tables(job);
  __syncthreads();
  rank_in_slabs(job.index, job.features, plan, job.slabs.count, [&](int64_t f) {
    const int64_t added = plan.added[job.features.table[f]];
    const int64_t before = plan.feature_in_table[f];
    return min(before + plan.feature_count[f], added) - min(before, added);
  });
  __syncthreads();
}

// Upper bound of ids for a counter table: whether an id without a row has a counter is known only
// when rows are given out.
__device__ int64_t most_counted(const Plan& plan, int64_t t) {
  return plan.counted[t] + min(plan.uncounted[t], plan.head[kPlanNoRoom]);
}

// Growth of a table's index; false if the memory does not suffice.
__device__ bool plan_table(const PlanJob& job, int64_t t) {
  const Plan& plan = job.plan;
  const int64_t* row = job.index.table_row(t);
  const int64_t region = job.index.meta_row(t)[kMetaRegionBuckets];
  // the slots of victims become tombstones
  const GrowthDecision decision =
      decide_growth(row[kTableBucketCount], region, row[kTableSize], row[kTableTombstones],
                    plan.added[t] + most_counted(plan, t), plan.evicted[t]);
  plan.old_buckets[t] = decision.rehash ? row[kTableBucketCount] : 0;
  plan.old_begin[t] = decision.bucket_count;  // until the sums below
  if (decision.rehash && decision.bucket_count > region) {
    job.errors.report(kErrorBuckets, t);
    return false;
  }
  if (decision.rehash && job.shared.words != nullptr &&
      decision.bucket_count > job.shared.table(t)[kSharedBucketLimit]) {
    job.errors.report(kErrorMemory, t);
    return false;
  }
  return true;
}

// Rows of a slab; false if it has too few.
__device__ bool plan_slab(const PlanJob& job, int64_t s) {
  const int64_t* slab = job.slabs.slabs + s * kSlabColumns;
  const int64_t fresh = max(job.plan.slab_rows[s] - slab[kSlabFreeCount], static_cast<int64_t>(0));
  const int64_t needed = slab[kSlabNextRow] + fresh;
  job.plan.slab_free[s] = slab[kSlabFreeCount];
  job.plan.slab_next[s] = slab[kSlabNextRow];
  if (needed > job.slabs.max_rows) {
    job.errors.report(kErrorRows, s);
    return false;
  }
  if (job.shared.words != nullptr && needed > job.shared.slab(s)[kSharedRowLimit]) {
    job.errors.report(kErrorMemory, s);
    return false;
  }
  return true;
}

// The counts of a table after the call, without the later effects of evictions and of counts that
// are dropped or added.
__device__ void advance_table(const PlanJob& job, int64_t t) {
  const Plan& plan = job.plan;
  int64_t* row = job.index.table_row(t);
  row[kTableSize] += plan.added[t] + plan.counted[t];
  row[kTableInserted] += plan.added[t] + plan.counted[t];
  row[kTableRejected] += plan.rejected[t];
  row[kTableNotAdmitted] += plan.not_admitted[t];
  row[kTableFound] += plan.ids[t] - plan.missed[t] - plan.padding[t];
  row[kTableMissed] += plan.missed[t];
  if (plan.old_buckets[t] > 0) {
    row[kTableBucketCount] = plan.old_begin[t];
    row[kTableTombstones] = 0;
    ++row[kTableGrowths];
  }
}

__device__ void advance_slab(const PlanJob& job, int64_t s) {
  int64_t* slab = job.slabs.slabs + s * kSlabColumns;
  const int64_t rows = job.plan.slab_rows[s];
  const int64_t reused = min(rows, slab[kSlabFreeCount]);
  const int64_t end = slab[kSlabNextRow] + rows - reused;
  slab[kSlabCommittedRows] = committed_after(slab[kSlabCommittedRows], slab[kSlabNextRow], end,
                                             slab[kSlabRowBytes], job.slabs.max_rows);
  slab[kSlabFreeCount] -= reused;
  slab[kSlabNextRow] = end;
}

// Counts that the host may read without waiting. Sizes and tombstones are bounds: slots will be
// cleared, and taken. `most_ids`: kSharedMostIds of the thread's first table.
__device__ void write_mirror(const PlanJob& job, int64_t most_ids) {
  const SharedWords& shared = job.shared;
  for (int64_t t = threadIdx.x; t < job.index.table_count; t += blockDim.x) {
    const int64_t* row = job.index.table_row(t);
    shared.table(t)[kSharedSize] =
        row[kTableSize] + most_counted(job.plan, t) - job.plan.counted[t];
    shared.table(t)[kSharedBucketCount] = row[kTableBucketCount];
    shared.table(t)[kSharedTombstones] =
        row[kTableTombstones] + job.plan.evicted[t] + job.plan.admitted[t];
    const int64_t ids = job.plan.ids[t];
    const bool is_first = t == static_cast<int64_t>(threadIdx.x);
    const int64_t most = is_first ? most_ids : shared.table(t)[kSharedMostIds];
    if (ids > most) shared.table(t)[kSharedMostIds] = ids;
  }
  for (int64_t s = threadIdx.x; s < job.slabs.count; s += blockDim.x) {
    shared.slab(s)[kSharedNextRow] = job.slabs.slabs[s * kSlabColumns + kSlabNextRow];
  }
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0 && job.room.call_number > 0) {
    shared.words[kSharedCalls] = job.room.call_number;
  }
}

// One block: decides growth, checks memory, advances the counts of tables and slabs.
__global__ void __launch_bounds__(kPlanBlock) plan_insertion(const __grid_constant__ PlanJob job) {
  __shared__ int refused;
  __shared__ unsigned long long old_buckets;
  const Plan& plan = job.plan;
  const int64_t tables = job.index.table_count;
  // A word in the host's memory, which only this kernel changes: it is on its way meanwhile.
  int64_t most_ids = 0;
  if (job.shared.words != nullptr && static_cast<int64_t>(threadIdx.x) < tables) {
    most_ids = job.shared.table(threadIdx.x)[kSharedMostIds];
  }
  if (threadIdx.x == 0) {
    refused = plan.head[kPlanInvalid] != 0 ? 1 : 0;
    old_buckets = 0;
  }
  __syncthreads();
  const FeatureArgs& features = job.features;
  for (int64_t f = threadIdx.x; refused == 0 && f < features.features; f += blockDim.x) {
    add_to(plan.ids + features.table[f], features.given_offset((f + 1) * features.batch) -
                                             features.given_offset(f * features.batch));
  }
  __syncthreads();
  const bool touched = plan.head[kPlanTouched] != 0 && plan.head[kPlanInvalid] == 0;
  int64_t total = 0;
  if (touched) {
    total = scan_counts(job.insert_counts, job.blocks);
    if (job.placed_counts != nullptr) total = scan_counts(job.placed_counts, job.blocks);
    rank_features(job.index, features, plan, job.slabs.count);
    if (job.policies.rows != nullptr) {
      plan_room(job, &refused);
      rank_rows(job);
    }
    for (int64_t t = threadIdx.x; t < tables; t += blockDim.x) {
      if (!plan_table(job, t)) atomicExch(&refused, 1);
      if (plan.old_buckets[t] > 0) {
        atomicAdd(&old_buckets, static_cast<unsigned long long>(plan.old_buckets[t]));
      }
      add_to(plan.slab_rows + job.index.meta_row(t)[kMetaSlab], plan.added[t]);
    }
    __syncthreads();
    for (int64_t s = threadIdx.x; s < job.slabs.count; s += blockDim.x) {
      if (!plan_slab(job, s)) atomicExch(&refused, 1);
    }
    __syncthreads();
    // the host's bound was wrong: nothing may be lost
    if (threadIdx.x == 0 && static_cast<int64_t>(old_buckets) > job.room.old_buckets) {
      job.errors.report(kErrorMemory, 0);
      refused = 1;
    }
  }
  __syncthreads();
  if (refused == 0) {
    for (int64_t t = threadIdx.x; t < tables; t += blockDim.x) advance_table(job, t);
  }
  if (touched && refused == 0) {
    for (int64_t s = threadIdx.x; s < job.slabs.count; s += blockDim.x) advance_slab(job, s);
    for (int64_t t = threadIdx.x; t < tables; t += blockDim.x) {
      add_to(plan.head + kPlanEvictors, plan.evicted[t]);
    }
    __syncthreads();
    const auto buckets = static_cast<int64_t>(old_buckets);
    if (buckets > 0 && tables > kFew) {
      running_sums(
          tables, [&](int64_t t) { return plan.old_buckets[t]; },
          [&](int64_t t, int64_t before) { plan.old_begin[t] = before; });
    } else if (threadIdx.x == 0 && buckets > 0) {
      int64_t before = 0;
      for (int64_t t = 0; t < tables; ++t) {
        plan.old_begin[t] = before;
        before += plan.old_buckets[t];
      }
    }
    if (threadIdx.x == 0) {
      plan.old_begin[tables] = buckets;
      plan.head[kPlanRehash] = buckets;
      plan.head[kPlanTotal] = total;
      plan.head[kPlanAccepted] = 1;
    }
  }
  if (job.shared.words == nullptr) return;
  __syncthreads();
  write_mirror(job, most_ids);
}

}  // namespace

void decide_insertion(const Call& call, const IndexArgs& index, const PolicyArgs& policies,
                      const SlabArgs& slabs, const PlannedCall& planned, const SharedWords& shared,
                      const InsertionRoom& room, int32_t* placed_counts) {
  const PlanJob job{
      index,         planned.features, planned.feature_order, policies, slabs,
      planned.plan,  shared,           error_sink(call),      room,     planned.block_counts,
      placed_counts, planned.blocks};
  call.launch(plan_insertion, kPlanBlock, kPlanBlock, job);
}

}  // namespace dynemb::cuda
