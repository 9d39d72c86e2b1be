// Growth of indexes, in the order that core/index/claim.h defines: first entries in their first
// bucket, from the last bucket down; then the others.
#include "cuda/index/growth.h"
#include "cuda/index/placement.cuh"
#include "cuda/memory/table_memory.h"

namespace dynemb::cuda {
namespace {

constexpr int kOneBlock = 512;

// The table of a bucket among all that are rehashed.
__device__ __forceinline__ int64_t old_table(const IndexArgs& index, const Plan& plan,
                                             int64_t bucket) {
  return part_of(plan.old_begin, index.table_count, bucket);
}

// Old entries by the order in which they are moved.
struct OldEntries {
  TableView table;
  const int64_t* lines;  // of the table
  int64_t old_bucket_count;

  __device__ __forceinline__ Entry operator()(int64_t order) const {
    const int64_t bucket = old_bucket_count - 1 - order / kBucketWidth;
    const int64_t key = lines[bucket * kBucketWords + order % kBucketWidth];
    const uint64_t hash = first_hash(key, table.salt);
    const bool kept = bucket_of(hash, old_bucket_count) == bucket;
    return {table, key, hash, kept ? kClaimKept : kClaimFirst};
  }
};

__device__ __forceinline__ OldEntries old_entries(const IndexArgs& index, const Plan& plan,
                                                  const OldIndex& old, int64_t table) {
  return {table_view(index, table), old.lines + plan.old_begin[table] * kBucketWords,
          plan.old_buckets[table]};
}

// A thread per 16 bytes of a line. Reads and writes each old line once and clears it, and likewise
// its scores: 192 bytes a bucket and 96 for each score word, in order; the floor is bandwidth.
__device__ __forceinline__ void take_out_lines(const IndexArgs& index, const Plan& plan,
                                               const OldIndex& old) {
  const int64_t total = plan.head[kPlanRehash] * kBucketWidth;
  const longlong2 zero = make_longlong2(0, 0);
  for (int64_t i = thread_number(); i < total; i += thread_total()) {
    const int64_t bucket = i / kBucketWidth;
    const int64_t part = i % kBucketWidth;
    const int64_t t = old_table(index, plan, bucket);
    const TableView table = table_view(index, t);
    const int64_t own = bucket - plan.old_begin[t];
    auto* line = reinterpret_cast<longlong2*>(table.line(own)) + part;
    reinterpret_cast<longlong2*>(old.lines + bucket * kBucketWords)[part] = *line;
    *line = zero;
    int64_t* scores = old.scores + bucket * index.score_words * kBucketWidth;
    for (int64_t p = part; p < table.score_words * kBucketWidth / 2; p += kBucketWidth) {
      auto* score = reinterpret_cast<longlong2*>(table.score(own, 0)) + p;
      reinterpret_cast<longlong2*>(scores)[p] = *score;
      *score = zero;
    }
  }
}

// Calls f(entries of the table, order, bucket, slot) for every old slot that holds an entry; a
// thread per slot.
template <class F>
__device__ __forceinline__ void for_each_old_entry(const IndexArgs& index, const Plan& plan,
                                                   const OldIndex& old, const F& f) {
  const int64_t total = plan.head[kPlanRehash] * kBucketWidth;
  for (int64_t i = thread_number(); i < total; i += thread_total()) {
    const int64_t bucket = i / kBucketWidth;
    const int slot = static_cast<int>(i % kBucketWidth);
    if (old.lines[bucket * kBucketWords + kBucketWidth + slot] == 0) continue;
    const int64_t t = old_table(index, plan, bucket);
    const int64_t order =
        move_order(bucket - plan.old_begin[t], slot, plan.old_buckets[t], kBucketWidth);
    f(old_entries(index, plan, old, t), order, bucket, slot);
  }
}

// A thread per old slot. Reads the old line in order and makes one random atomic (64-byte line) for
// most entries, about 1.2 on average; those are the floor.
__device__ __forceinline__ void claim_places(const IndexArgs& index, const Plan& plan,
                                             const OldIndex& old) {
  for_each_old_entry(index, plan, old, [&](const OldEntries& entries, int64_t order, int64_t, int) {
    claim_place(entries, order);
  });
}

// A thread per old slot. As above, with reads and three writes to the random line instead of
// atomics.
__device__ __forceinline__ void settle_entries(const IndexArgs& index, const Plan& plan,
                                               const OldIndex& old) {
  for_each_old_entry(
      index, plan, old, [&](const OldEntries& entries, int64_t order, int64_t bucket, int slot) {
        const int64_t stored = old.lines[bucket * kBucketWords + kBucketWidth + slot];
        const int64_t* scores = old.scores + bucket * index.score_words * kBucketWidth + slot;
        settle_claim(entries(order), order, stored,
                     [&](int64_t word) { return scores[word * kBucketWidth]; });
      });
}

__global__ void take_out(IndexArgs index, Plan plan, OldIndex old) {
  take_out_lines(index, plan, old);
}
__global__ void claim_moved(IndexArgs index, Plan plan, OldIndex old) {
  claim_places(index, plan, old);
}
__global__ void settle_moved(IndexArgs index, Plan plan, OldIndex old) {
  settle_entries(index, plan, old);
}

// One block: the three, if the host expects nothing to move.
__global__ void __launch_bounds__(kOneBlock)
    grow_in_one_block(IndexArgs index, Plan plan, OldIndex old) {
  if (plan.head[kPlanRehash] == 0) return;
  take_out_lines(index, plan, old);
  __syncthreads();
  claim_places(index, plan, old);
  __syncthreads();
  settle_entries(index, plan, old);
}

// One thread: changes of the table's descriptor by grow_ or shrink_, if any.
__global__ void plan_growth(IndexArgs index, Plan plan, SharedWords shared, ErrorSink errors,
                            int64_t table, int64_t wanted, Rehash when) {
  int64_t* row = index.table_row(table);
  const int64_t old = row[kTableBucketCount];
  const bool grows = when == Rehash::kShrink
                         ? wanted < old
                         : wanted > old || (wanted == old && when == Rehash::kCompact);
  if (grows && (wanted > index.meta_row(table)[kMetaRegionBuckets] ||
                (shared.words != nullptr && wanted > shared.table(table)[kSharedBucketLimit]))) {
    errors.report(kErrorBuckets, table);
    return;
  }
  for (int64_t t = 0; t <= index.table_count; ++t) plan.old_begin[t] = t > table && grows ? old : 0;
  if (!grows) return;
  plan.old_buckets[table] = old;
  plan.head[kPlanRehash] = old;
  row[kTableBucketCount] = wanted;
  row[kTableTombstones] = 0;
  ++row[kTableGrowths];
  if (shared.words != nullptr) {
    shared.table(table)[kSharedBucketCount] = wanted;
    shared.table(table)[kSharedTombstones] = 0;
  }
}

// Grows the index of one table for `ids` ids.
void grow_(Tensor buckets, Tensor scores, Tensor tables, Tensor meta, int64_t table, int64_t ids) {
  const Call call("grow_", "buckets", buckets);
  const IndexArgs index = index_args(call, buckets, &scores, tables, meta);
  const InOrder in_order(call, stream_order(buckets));
  check_table_number(call.op, table, index.table_count);
  check_room(call.op, ids);
  const int64_t wanted = buckets_for(ids);
  const auto group = group_memory(call, buckets);
  map_buckets(call, group.get(), table, wanted);
  const int64_t most = std::min(wanted, buckets.size(0) + 1);
  rehash_table(call, index, shared_words(group.get()), table, most, Rehash::kGrow, most);
}

// Places all entries of one table again, in the fewest buckets for `ids` ids. Waits for the device.
void shrink_(Tensor buckets, Tensor scores, Tensor tables, Tensor meta, int64_t table,
             int64_t ids) {
  const Call call("shrink_", "buckets", buckets);
  const IndexArgs index = index_args(call, buckets, &scores, tables, meta);
  const InOrder in_order(call, stream_order(buckets));
  check_table_number(call.op, table, index.table_count);
  check_room(call.op, ids);
  const auto group = group_memory(call, buckets);
  const auto row =
      call.read("reading the table's counts", index.tables + table * kTableColumns, kTableColumns);
  const int64_t wanted = buckets_for(std::max(ids, row[kTableSize]));
  if (wanted >= row[kTableBucketCount]) return;
  rehash_table(call, index, shared_words(group.get()), table, wanted, Rehash::kShrink,
               row[kTableBucketCount]);
}

}  // namespace

OldIndexParts add_old_index(Scratch* scratch, int64_t buckets, int64_t score_words) {
  return {scratch->add<int64_t>(buckets * kBucketWords),
          scratch->add<int64_t>(buckets * score_words * kBucketWidth), score_words > 0};
}

void rehash(const Call& call, const IndexArgs& index, const Plan& plan, const Scratch& scratch,
            const OldIndexParts& parts, int64_t buckets, bool expected) {
  const OldIndex old{scratch.get(parts.lines), parts.scored ? scratch.get(parts.scores) : nullptr};
  if (!expected) {
    call.launch(grow_in_one_block, kOneBlock, kOneBlock, index, plan, old);
    return;
  }
  const int64_t work = buckets * kBucketWidth;
  call.launch_strided(take_out, work, index, plan, old);
  call.launch_strided(claim_moved, work, index, plan, old);
  call.launch_strided(settle_moved, work, index, plan, old);
}

void rehash_table(const Call& call, const IndexArgs& index, const SharedWords& shared,
                  int64_t table, int64_t wanted, Rehash when, int64_t most) {
  Scratch scratch;
  const int64_t words = plan_words(0, index.table_count, 0);
  const auto plan_part = scratch.add<int64_t>(words);
  const OldIndexParts parts = add_old_index(&scratch, most, index.score_words);
  scratch.allocate(call);
  const Plan plan = make_plan(scratch.get(plan_part), 0, index.table_count, 0);
  call.fill(scratch.get(plan_part), 0, words * 8);
  call.launch(plan_growth, 1, 1, index, plan, shared, error_sink(call), table, wanted, when);
  rehash(call, index, plan, scratch, parts, most, true);
}

}  // namespace dynemb::cuda

DYNEMB_IMPLEMENT_OPS(m) {
  m.impl("grow_", TORCH_BOX(&dynemb::cuda::grow_));
  m.impl("shrink_", TORCH_BOX(&dynemb::cuda::shrink_));
}
