// erase_: removes ids from the index; their rows go to the free list in order of first occurrence.
#include "cuda/index/planned_call.h"
#include "cuda/memory/table_memory.h"

namespace dynemb::cuda {
namespace {

// A thread per id. As find_ids (find.cu). `work` gets the dedupe slot of an id in the table,
// `places` its position and whether its bucket was ever full.
__global__ void find_erased(IndexArgs index, FeatureArgs features, ErrorSink errors,
                            DedupeTable dedupe, Plan plan, int64_t threads, int64_t* work,
                            int64_t* places) {
  const int64_t i = thread_number();
  if (i >= threads) return;
  if (!check_offset(features, errors, i)) note_in_plan(plan, kPlanInvalid);
  if (i >= features.count) return;
  const int64_t id = features.ids[i];
  const int64_t t = features.table_of(i);
  const FoundSlot found = find_slot(table_view(index, t), id);
  if (found.stored == 0) {
    work[i] = 0;
    return;
  }
  work[i] = kMissBase - dedupe_id(dedupe, features, i, id, t);
  places[i] = pack_place({found.bucket, found.slot, found.never_full});
  note_in_plan(plan, kPlanTouched);
}

// One block: the counts of tables and slabs.
__global__ void __launch_bounds__(kPlanBlock)
    plan_erasure(IndexArgs index, FeatureArgs features, int64_t* slabs, int64_t slab_count,
                 Plan plan, int32_t* block_counts, int64_t blocks, int64_t* erased) {
  if (plan.head[kPlanTouched] == 0 || plan.head[kPlanInvalid] != 0) return;
  const int64_t total = scan_counts(block_counts, blocks);
  rank_features(index, features, plan, slab_count);
  for (int64_t t = threadIdx.x; t < index.table_count; t += blockDim.x) {
    const int64_t removed = plan.added[t];
    erased[t] = removed;
    if (has_rows(index, t)) add_to(plan.slab_rows + index.meta_row(t)[kMetaSlab], removed);
    index.table_row(t)[kTableSize] -= removed;
    index.table_row(t)[kTableErased] += removed;
  }
  __syncthreads();
  for (int64_t s = threadIdx.x; s < slab_count; s += blockDim.x) {
    int64_t* slab = slabs + s * kSlabColumns;
    plan.slab_free[s] = slab[kSlabFreeCount];
    slab[kSlabFreeCount] += plan.slab_rows[s];
  }
  if (threadIdx.x == 0) plan.head[kPlanTotal] = total;
}

// A thread per id; for a removed id, one random 64-byte line read and written.
__global__ void clear_slots(IndexArgs index, FeatureArgs features, int64_t* free_rows,
                            int64_t max_rows, DedupeTable dedupe, Plan plan,
                            const int32_t* block_counts, const int64_t* work,
                            const int64_t* places) {
  if (plan.head[kPlanTotal] == 0) return;
  const int64_t i = thread_number();
  const bool first = is_first(features, dedupe, work, i);
  const int64_t rank = block_counts[blockIdx.x] + rank_in_block(first);
  if (!first) return;
  const int64_t f = features.feature_of(i);
  const int64_t t = features.table[f];
  const int64_t s = index.meta_row(t)[kMetaSlab];
  const int64_t row = rank - plan.feature_first[f] + plan.feature_row[f];
  const TableView table = table_view(index, t);
  const SlotPlace place = unpack_place(places[i]);
  if (has_rows(index, t)) {
    free_rows[s * max_rows + plan.slab_free[s] + row] =
        next_owner(decode_handle(table.line(place.bucket)[kBucketWidth + place.slot]));
  }
  if (clear_slot(table, place)) {
    atomicAdd(reinterpret_cast<unsigned long long*>(index.table_row(t) + kTableTombstones), 1ULL);
  }
}

// Returns the number of removed ids, per table. An id given twice counts once.
Tensor erase_(Tensor buckets, Tensor scores, Tensor tables, Tensor slabs, Tensor free_rows,
              Tensor meta, Tensor ids, Tensor offsets, std::vector<int64_t> feature_tables) {
  const Call call("erase_", "buckets", buckets);
  const IndexArgs index = index_args(call, buckets, &scores, tables, meta);
  const InOrder in_order(call, stream_order(buckets));
  PlannedCall planned(call, index, slabs, free_rows, ids, offsets, feature_tables);
  const FeatureArgs& features = planned.features;
  note_erasure(group_memory(call, buckets).get(), features.count);
  const auto work_part = planned.scratch.add<int64_t>(features.count);
  const auto place_part = planned.scratch.add<int64_t>(features.count);
  planned.start(call);
  const Plan& plan = planned.plan;
  const DedupeTable& dedupe = planned.dedupe;
  const int64_t rank_threads = planned.blocks * kRankBlock;
  int64_t* work = planned.scratch.get(work_part);
  int64_t* places = planned.scratch.get(place_part);
  Tensor erased = call.empty({index.table_count}, ScalarType::Long);
  auto* erased_counts = static_cast<int64_t*>(erased.data_ptr());
  auto* slab = static_cast<int64_t*>(slabs.data_ptr());

  call.fill(erased_counts, 0, index.table_count * 8);
  const int64_t threads = features.threads();
  call.launch(find_erased, threads, 0, index, features, error_sink(call), dedupe, plan, threads,
              work, places);
  count_distinct(call, planned, work);
  call.launch(plan_erasure, kPlanBlock, kPlanBlock, index, features, slab, slabs.size(0), plan,
              planned.block_counts, planned.blocks, erased_counts);
  call.launch(clear_slots, rank_threads, kRankBlock, index, features,
              static_cast<int64_t*>(free_rows.data_ptr()), free_rows.size(1), dedupe, plan,
              planned.block_counts, work, places);
  return erased;
}

}  // namespace
}  // namespace dynemb::cuda

DYNEMB_IMPLEMENT_OPS(m) { m.impl("erase_", TORCH_BOX(&dynemb::cuda::erase_)); }
