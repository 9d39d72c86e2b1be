// find_or_insert_: finds all ids, then gives rows to the new ones, in order of first occurrence and
// with the integers that the CPU gives (csrc/README.md). The host learns nothing on the way: a plan
// made on the device says how many ids are new, and later kernels do as much as it says.
#include "core/row_allocation.h"
#include "cuda/claim.cuh"
#include "cuda/index_growth.h"
#include "cuda/planned_call.h"
#include "cuda/table_memory.h"

namespace dynemb::cuda {
namespace {

struct SlabArgs {
  int64_t* slabs;
  const int64_t* free_rows;
  int64_t max_rows;
  int64_t count;
};

// A thread per id. As find_ids (index_find.cu); with scores one more random access of 8 bytes, and
// for a new id one random atomic of 4 bytes in a table that mostly stays in the L2 cache.
__global__ void find_or_claim(IndexArgs index, FeatureArgs features, ErrorSink errors,
                              const int64_t* clock, DedupeTable dedupe, Plan plan, int64_t threads,
                              int64_t* handles) {
  const int64_t i = thread_number();
  if (i >= threads) return;
  if (!check_offset(features, errors, i)) plan.head[kPlanInvalid] = 1;
  if (i >= features.count) return;
  const int64_t id = features.ids[i];
  const int64_t t = features.table[features.features == 1 ? 0 : features.feature_of(i)];
  const TableView table = table_view(index, t);
  const FoundSlot found = find_slot(table, id);
  if (found.stored != 0) {
    handles[i] = decode_handle(found.stored);
    if (table.scores != nullptr) *table.score(found.bucket, found.slot) = *clock;
    return;
  }
  const int64_t* meta = index.meta_row(t);
  if (meta[kMetaHasPadding] != 0 && meta[kMetaPaddingId] == id) {
    handles[i] = kPaddingHandle;
    return;
  }
  handles[i] = kMissBase - dedupe.insert(features, i, id, t);
  plan.head[kPlanTouched] = 1;
}

// A thread per id: reads 8 bytes in order, and 4 at random for a miss.
__global__ void count_new(FeatureArgs features, DedupeTable dedupe, Plan plan,
                          const int64_t* handles, int32_t* block_counts) {
  if (plan.head[kPlanTouched] == 0) return;
  const int64_t i = thread_number();
  const bool first = is_first(features, dedupe, handles, i);
  const int64_t feature = first && features.features > 1 ? features.feature_of(i) : 0;
  count_firsts(features, plan, first, feature, block_counts);
}

// One block: decides growth, checks room, advances the counts of tables and slabs.
__global__ void __launch_bounds__(kPlanBlock)
    plan_insertion(IndexArgs index, FeatureArgs features, SlabArgs slabs, Plan plan,
                   SharedWords shared, ErrorSink errors, InsertionRoom room, int32_t* block_counts,
                   int64_t blocks) {
  __shared__ int refused;
  if (threadIdx.x == 0) refused = 0;
  __syncthreads();
  const bool touched = plan.head[kPlanTouched] != 0 && plan.head[kPlanInvalid] == 0;
  if (touched) {
    const int64_t total = scan_counts(block_counts, blocks);
    rank_features(index, features, plan);
    for (int64_t t = threadIdx.x; t < index.table_count; t += blockDim.x) {
      const int64_t* row = index.table_row(t);
      const int64_t added = table_total(features, plan, t);
      const int64_t region = index.meta_row(t)[kMetaRegionBuckets];
      const GrowthDecision decision = decide_growth(row[kTableBucketCount], region, row[kTableSize],
                                                    row[kTableTombstones], added);
      plan.old_buckets[t] = decision.rehash ? row[kTableBucketCount] : 0;
      plan.old_begin[t] = decision.bucket_count;  // until the sums below
      if (decision.rehash && decision.bucket_count > region) {
        errors.report(kErrorBuckets, t);
        refused = 1;
      } else if (decision.rehash && shared.words != nullptr &&
                 decision.bucket_count > shared.table(t)[kSharedBucketLimit]) {
        errors.report(kErrorMemory, t);
        refused = 1;
      }
    }
    for (int64_t s = threadIdx.x; s < slabs.count; s += blockDim.x) {
      const int64_t* slab = slabs.slabs + s * kSlabColumns;
      const int64_t rows = slab_total(index, features, plan, s);
      const int64_t fresh = max(rows - slab[kSlabFreeCount], static_cast<int64_t>(0));
      const int64_t needed = slab[kSlabNextRow] + fresh;
      plan.slab_free[s] = slab[kSlabFreeCount];
      plan.slab_next[s] = slab[kSlabNextRow];
      if (needed > slabs.max_rows) {
        errors.report(kErrorRows, s);
        refused = 1;
      } else if (shared.words != nullptr && needed > shared.slab(s)[kSharedRowLimit]) {
        errors.report(kErrorMemory, s);
        refused = 1;
      }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      int64_t old_buckets = 0;
      for (int64_t t = 0; t < index.table_count; ++t) old_buckets += plan.old_buckets[t];
      if (old_buckets > room.old_buckets) {  // the host's bound was wrong: nothing may be lost
        errors.report(kErrorMemory, 0);
        refused = 1;
      }
    }
    __syncthreads();
    if (refused == 0) {
      for (int64_t t = threadIdx.x; t < index.table_count; t += blockDim.x) {
        int64_t* row = index.table_row(t);
        const int64_t added = table_total(features, plan, t);
        row[kTableSize] += added;
        row[kTableInserted] += added;
        if (plan.old_buckets[t] > 0) {
          row[kTableBucketCount] = plan.old_begin[t];
          row[kTableTombstones] = 0;
          ++row[kTableGrowths];
        }
      }
      for (int64_t s = threadIdx.x; s < slabs.count; s += blockDim.x) {
        int64_t* slab = slabs.slabs + s * kSlabColumns;
        const int64_t rows = slab_total(index, features, plan, s);
        const int64_t reused = min(rows, slab[kSlabFreeCount]);
        const int64_t end = slab[kSlabNextRow] + rows - reused;
        slab[kSlabCommittedRows] = committed_after(slab[kSlabCommittedRows], slab[kSlabNextRow],
                                                   end, slab[kSlabRowBytes], slabs.max_rows);
        slab[kSlabFreeCount] -= reused;
        slab[kSlabNextRow] = end;
      }
      __syncthreads();
      if (threadIdx.x == 0) {
        plan.head[kPlanTotal] = total;
        int64_t buckets = 0;
        for (int64_t t = 0; t < index.table_count; ++t) {
          plan.old_begin[t] = buckets;
          buckets += plan.old_buckets[t];
        }
        plan.old_begin[index.table_count] = buckets;
        plan.head[kPlanRehash] = buckets;
      }
    }
  }
  if (shared.words == nullptr) return;
  __syncthreads();
  for (int64_t t = threadIdx.x; t < index.table_count; t += blockDim.x) {
    const int64_t* row = index.table_row(t);
    shared.table(t)[kSharedSize] = row[kTableSize];
    shared.table(t)[kSharedBucketCount] = row[kTableBucketCount];
    shared.table(t)[kSharedTombstones] = row[kTableTombstones];
  }
  for (int64_t s = threadIdx.x; s < slabs.count; s += blockDim.x) {
    shared.slab(s)[kSharedNextRow] = slabs.slabs[s * kSlabColumns + kSlabNextRow];
  }
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0 && room.call_number > 0) shared.words[kSharedCalls] = room.call_number;
}

// A thread per id: reads 8 bytes in order; for a new id 4 at random, and writes 12 in order.
__global__ void give_rows(IndexArgs index, FeatureArgs features, SlabArgs slabs, DedupeTable dedupe,
                          Plan plan, const int32_t* block_counts, int64_t* handles,
                          int32_t* new_positions) {
  if (plan.head[kPlanTotal] == 0) return;
  const int64_t i = thread_number();
  const bool first = is_first(features, dedupe, handles, i);
  const int64_t rank = block_counts[blockIdx.x] + rank_in_block(first);
  if (!first) return;
  const int64_t f = features.features == 1 ? 0 : features.feature_of(i);
  const int64_t s = index.meta_row(features.table[f])[kMetaSlab];
  const int64_t row = rank - plan.feature_first[f] + plan.feature_row[f];
  const int64_t free = plan.slab_free[s];
  new_positions[rank] = static_cast<int32_t>(i);
  handles[i] = row < free ? slabs.free_rows[s * slabs.max_rows + free - 1 - row]
                          : make_handle(plan.slab_next[s] + row - free, kFirstGeneration);
}

// The new ids of a call in order of first occurrence.
struct NewEntries {
  IndexArgs index;
  FeatureArgs features;
  const int32_t* positions;

  __device__ __forceinline__ int64_t table(int64_t order) const {
    return features.table[features.features == 1 ? 0 : features.feature_of(positions[order])];
  }
  __device__ __forceinline__ Entry operator()(int64_t order) const {
    const TableView view = table_view(index, table(order));
    const int64_t key = features.ids[positions[order]];
    return {view, key, first_hash(key, view.salt), kClaimFirst};
  }
};

// A thread per new id: 12 bytes in order or nearly so, one random atomic (1.2 on average).
__global__ void claim_new(NewEntries entries, Plan plan) {
  const int64_t total = plan.head[kPlanTotal];
  for (int64_t e = thread_number(); e < total; e += thread_total()) claim_place(entries, e);
}

// A thread per new id: as above, with one random 64-byte line read and written.
__global__ void settle_new(NewEntries entries, Plan plan, const int64_t* clock,
                           const int64_t* handles) {
  const int64_t total = plan.head[kPlanTotal];
  for (int64_t e = thread_number(); e < total; e += thread_total()) {
    const int64_t stored = encode_handle(handles[entries.positions[e]]);
    if (settle_claim(entries(e), e, stored, *clock)) {
      auto* tombstones = entries.index.table_row(entries.table(e)) + kTableTombstones;
      atomicAdd(reinterpret_cast<unsigned long long*>(tombstones), ~0ULL);
    }
  }
}

// A thread per id: reads 8 bytes in order; for a miss two more at random, and writes 8.
__global__ void finish_handles(FeatureArgs features, DedupeTable dedupe, Plan plan,
                               int64_t* handles) {
  const int64_t i = thread_number();
  if (plan.head[kPlanTouched] == 0 || i >= features.count) return;
  const int64_t handle = handles[i];
  if (handle > kMissBase) return;
  const bool inserted = plan.head[kPlanTotal] > 0;
  handles[i] = inserted ? handles[dedupe.slots[kMissBase - handle]] : kNoHandle;
}

// Distinct new ids of each table, read back: only where memory for the bound could not be mapped.
std::vector<int64_t> count_exactly(const Call& call, const Plan& plan,
                                   const std::vector<int64_t>& feature_tables,
                                   int64_t table_count) {
  std::vector<int64_t> counts(feature_tables.size());
  check_cuda(call.op, "reading the number of new ids",
             cudaMemcpyAsync(counts.data(), plan.feature_count, counts.size() * 8,
                             cudaMemcpyDeviceToHost, call.stream));
  call.synchronize();
  std::vector<int64_t> new_ids(static_cast<size_t>(table_count), 0);
  for (size_t f = 0; f < counts.size(); ++f) {
    new_ids[static_cast<size_t>(feature_tables[f])] += counts[f];
  }
  return new_ids;
}

Tensor find_or_insert_(Tensor buckets, Tensor scores, Tensor tables, Tensor slabs, Tensor free_rows,
                       Tensor meta, Tensor clock, Tensor ids, Tensor offsets,
                       std::vector<int64_t> feature_tables) {
  const Call call("find_or_insert_", "buckets", buckets);
  const IndexArgs index = index_args(call, buckets, &scores, tables, meta);
  call.check("clock", clock, ScalarType::Long);
  check_size(call.op, "clock", clock, 0, 1);
  PlannedCall planned(call, index, slabs, free_rows, ids, offsets, feature_tables);
  const FeatureArgs& features = planned.features;
  const SlabArgs slab_args{static_cast<int64_t*>(slabs.data_ptr()),
                           static_cast<const int64_t*>(free_rows.data_ptr()), free_rows.size(1),
                           slabs.size(0)};
  const auto group = group_memory(call, buckets);
  InsertionRoom room = prepare_insertion(call, group.get(), feature_tables, features.count);
  if (group == nullptr) room.old_buckets = buckets.size(0);

  const auto position_part = planned.scratch.add<int32_t>(features.count);
  planned.start(call);
  const Plan& plan = planned.plan;
  const DedupeTable& dedupe = planned.dedupe;
  const int64_t rank_threads = planned.blocks * kRankBlock;
  int32_t* new_positions = planned.scratch.get(position_part);
  Tensor handles = call.empty({features.count}, ScalarType::Long);
  auto* handle = static_cast<int64_t*>(handles.data_ptr());
  const auto* now = static_cast<const int64_t*>(clock.data_ptr());
  const SharedWords shared = shared_words(group.get());

  const int64_t threads = features.threads();
  call.launch(find_or_claim, threads, 0, index, features, error_sink(call), now, dedupe, plan,
              threads, handle);
  call.launch(count_new, rank_threads, kRankBlock, features, dedupe, plan, handle,
              planned.block_counts);
  // The plan changes the tables: all memory must have been allocated by then.
  Scratch old_scratch;
  OldIndexParts old_parts{};
  if (room.growth) {
    old_parts = add_old_index(&old_scratch, room.old_buckets, index.scores != nullptr);
    old_scratch.allocate(call);
  }
  if (!room.mapped) {
    map_exactly(call, group.get(), count_exactly(call, plan, feature_tables, index.table_count));
  }
  call.launch(plan_insertion, kPlanBlock, kPlanBlock, index, features, slab_args, plan, shared,
              error_sink(call), room, planned.block_counts, planned.blocks);
  if (room.growth) rehash(call, index, plan, old_scratch, old_parts, room.old_buckets);
  call.launch(give_rows, rank_threads, kRankBlock, index, features, slab_args, dedupe, plan,
              planned.block_counts, handle, new_positions);
  const NewEntries entries{index, features, new_positions};
  call.launch_strided(claim_new, features.count, entries, plan);
  call.launch_strided(settle_new, features.count, entries, plan, now, handle);
  call.launch(finish_handles, features.count, 0, features, dedupe, plan, handle);
  return handles;
}

}  // namespace
}  // namespace dynemb::cuda

DYNEMB_IMPLEMENT_OPS(m) { m.impl("find_or_insert_", TORCH_BOX(&dynemb::cuda::find_or_insert_)); }
