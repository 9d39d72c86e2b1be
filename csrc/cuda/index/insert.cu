// find_or_insert_: finds all ids, then gives rows to the new ones, in order of first occurrence and
// with the integers of the CPU (csrc/README.md). The host learns nothing meanwhile: a plan made on
// the device has the number of new ids, and later kernels follow it.
#include <optional>

#include "cuda/index/admission.h"
#include "cuda/index/eviction.h"
#include "cuda/index/growth.h"
#include "cuda/index/policy_args.h"
#include "cuda/memory/table_memory.h"

namespace dynemb::cuda {
namespace {

// A thread per id. As find_ids (find.cu); with scores one more random access of 8 bytes for
// each word that changes, and for a new id one random atomic of 4 bytes in a table that mostly
// stays in the L2 cache, or two with policies. `admit` may be nullptr.
template <bool kPolicies>
__global__ void find_or_claim(IndexArgs index, FeatureArgs features, ErrorSink errors,
                              PolicyArgs policies, DedupeTable dedupe, NewIds new_ids,
                              const bool* admit, Plan plan, int64_t threads, int64_t* handles) {
  const int64_t i = thread_number();
  if (i < threads && !check_offset(features, errors, i)) note_in_plan(plan, kPlanInvalid);
  int64_t t = 0;
  bool missed = false;
  bool padding = false;
  int64_t* decayed = nullptr;
  int64_t decay_time = 0;
  if (i < features.count) {
    const int64_t id = features.ids[i];
    const int64_t f = features.feature_of(i);
    t = features.table[f];
    const TableView table = table_view(index, t);
    const FoundSlot found = find_slot(table, id);
    int64_t handle = decode_handle(found.stored);
    if (found.stored != 0) {
      if (table.scores != nullptr) {
        int64_t* score = table.score(found.bucket, found.slot);
        store_racing(score, policies.clock[kClockStep]);  // the same for all threads
        if constexpr (kPolicies) {
          const ScoreUpdate update = policy_update(policies.feature_row(f), policies.clock, t);
          decay_time = update.decay_time;
          if (update.refresh) decayed = refresh_scores(update, score);
        }
      }
    } else {
      const int64_t* meta = index.meta_row(t);
      padding = meta[kMetaHasPadding] != 0 && meta[kMetaPaddingId] == id;
      missed = !padding;
      handle = kPaddingHandle;
    }
    if (missed) {
      const int64_t slot = dedupe_id(dedupe, features, i, id, t);
      handle = kMissBase - slot;
      note_in_plan(plan, kPlanTouched);
      if constexpr (kPolicies) {
        if (policies.feature_row(f)[kPolicyUpdatesScores] != 0) {
          atomicAdd(new_ids.occurrences + slot, 1);
        }
        new_ids.note_feature(slot, policies.feature_row(f), policies.clock);
        // the same for all threads
        if (admit != nullptr && admit[i]) store_racing(new_ids.wanted + slot, uint8_t{1});
      }
    }
    handles[i] = handle;
  }
  if constexpr (kPolicies) add_occurrences(decayed, decay_time);
  if (__syncthreads_count(missed || padding) == 0) return;  // most blocks of most steps
  count_in_block(missed, t, plan.missed);
  count_in_block(padding, t, plan.padding);
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
  const int64_t f = features.feature_of(i);
  const int64_t s = index.meta_row(features.table[f])[kMetaSlab];
  new_positions[rank] = static_cast<int32_t>(i);
  handles[i] = slabs.row_handle(plan, s, rank - plan.feature_first[f] + plan.feature_row[f]);
}

// The new ids of a call in order of first occurrence, for tables without a policy.
struct NewEntries {
  IndexArgs index;
  FeatureArgs features;
  const int32_t* positions;
  const int64_t* handles;
  const int64_t* clock;

  __device__ __forceinline__ int64_t table(int64_t order) const {
    return features.table_of(positions[order]);
  }
  __device__ __forceinline__ Entry operator()(int64_t order) const {
    const TableView view = table_view(index, table(order));
    const int64_t key = features.ids[positions[order]];
    return {view, key, first_hash(key, view.salt), kClaimFirst};
  }
  __device__ __forceinline__ bool placed(int64_t) const { return true; }
  __device__ __forceinline__ int64_t stored(int64_t order) const {
    return encode_handle(handles[positions[order]]);
  }
  struct Score {
    int64_t step;
    __device__ __forceinline__ int64_t operator()(int64_t word) const {
      return word == kStepWord ? step : 0;
    }
  };
  __device__ __forceinline__ Score score(int64_t) const { return {clock[kClockStep]}; }
};

// A thread per new id: 12 bytes in order or nearly so, one random atomic (1.2 on average).
template <class Entries>
__global__ void claim_new(Entries entries, Plan plan) {
  const int64_t total = plan.head[kPlanTotal];
  for (int64_t e = thread_number(); e < total; e += thread_total()) {
    if (entries.placed(e)) claim_place(entries, e);
  }
}

// A thread per new id: as above, with one random 64-byte line and the scores read and written.
template <class Entries>
__global__ void settle_new(Entries entries, Plan plan) {
  const int64_t total = plan.head[kPlanTotal];
  for (int64_t e = thread_number(); e < total; e += thread_total()) {
    if (!entries.placed(e)) continue;
    if (settle_claim(entries(e), e, entries.stored(e), entries.score(e))) {
      auto* tombstones = entries.index.table_row(entries.table(e)) + kTableTombstones;
      atomicAdd(reinterpret_cast<unsigned long long*>(tombstones), ~0ULL);
    }
  }
}

// A thread per id: reads 8 bytes in order; for a miss two more at random, and writes 8.
template <bool kPolicies>
__global__ void finish_handles(IndexArgs index, FeatureArgs features, DedupeTable dedupe, Plan plan,
                               int64_t* handles) {
  if (plan.head[kPlanTouched] == 0) return;
  const int64_t i = thread_number();
  const bool accepted = plan.head[kPlanAccepted] != 0;
  int64_t handle = kPaddingHandle;
  if (i < features.count) {
    handle = handles[i];
    if (handle <= kMissBase) {
      handle = accepted ? handles[dedupe.slots[kMissBase - handle]] : kNoHandle;
      handles[i] = handle;
    }
  }
  if constexpr (kPolicies) {
    const bool refused = handle == kRefusedHandle;
    const int64_t f = refused ? features.feature_of(i) : 0;
    count_in_block(refused, features.table[f] * kTableColumns, index.tables + kTableDefaultServed);
  }
}

// New ids, read back: only if memory for the bound could not be mapped.
NewIdCounts count_exactly(const Call& call, const Plan& plan,
                          const std::vector<int64_t>& feature_tables, int64_t table_count) {
  const auto read = [&](const int64_t* from, int64_t count) {
    return call.read("reading the number of new ids", from, count);
  };
  const auto of_feature = read(plan.feature_count, static_cast<int64_t>(feature_tables.size()));
  NewIdCounts counts{std::vector<int64_t>(static_cast<size_t>(table_count), 0),
                     read(plan.counted, table_count)};
  const auto uncounted = read(plan.uncounted, table_count);
  for (size_t t = 0; t < uncounted.size(); ++t) counts.counted[t] += uncounted[t];
  for (size_t f = 0; f < of_feature.size(); ++f) {
    counts.inserted[static_cast<size_t>(feature_tables[f])] += of_feature[f];
  }
  return counts;
}

// Scratch memory of a call with policies.
struct PolicyParts {
  Scratch::Part<int32_t> occurrences;
  Scratch::Part<uint8_t> wanted;
  Scratch::Part<uint8_t> verdicts;
  Scratch::Part<int64_t> counts;
  Scratch::Part<int32_t> placed_counts;
  Scratch::Part<int32_t> feature;
  Scratch::Part<int64_t> stored;
  Scratch::Part<int32_t> placed_occurrences;
  Scratch::Part<int64_t> victims;
  Scratch::Part<unsigned long long> ranks;
  Scratch::Part<int64_t> expires;

  // `ranks`: features of one table have different policies.
  PolicyParts(Scratch* scratch, int64_t ids, int64_t slots, int64_t blocks, bool ranked)
      : occurrences(scratch->add<int32_t>(slots)),
        wanted(scratch->add<uint8_t>(slots)),
        verdicts(scratch->add<uint8_t>(ids)),
        counts(scratch->add<int64_t>(ids)),
        placed_counts(scratch->add<int32_t>(blocks)),
        feature(scratch->add<int32_t>(ids)),
        stored(scratch->add<int64_t>(ids)),
        placed_occurrences(scratch->add<int32_t>(ids)),
        victims(scratch->add<int64_t>(ids)),
        ranks(scratch->add<unsigned long long>(ranked ? 2 * slots : 0)),
        expires(scratch->add<int64_t>(ranked ? ids : 0)) {}
};

// Whether two features of one table have different policies.
bool policies_differ(const std::vector<int64_t>& feature_tables,
                     const std::vector<int64_t>& feature_policies, int64_t table_count) {
  std::vector<int64_t> of_table(static_cast<size_t>(table_count), -1);
  for (size_t f = 0; f < feature_policies.size(); ++f) {
    int64_t& known = of_table[static_cast<size_t>(feature_tables[f])];
    if (known >= 0 && known != feature_policies[f]) return true;
    known = feature_policies[f];
  }
  return false;
}

Tensor find_or_insert_(Tensor buckets, Tensor scores, Tensor tables, Tensor slabs, Tensor free_rows,
                       Tensor sketch, Tensor evicted, Tensor meta, Tensor policy, Tensor clock,
                       Tensor ids, Tensor offsets, std::optional<Tensor> admit,
                       std::vector<int64_t> feature_tables, std::vector<int64_t> feature_policies) {
  const Call call("find_or_insert_", "buckets", buckets);
  const IndexArgs index = index_args(call, buckets, &scores, tables, meta);
  const InOrder in_order(call, stream_order(buckets));
  PlannedCall planned(call, index, slabs, free_rows, ids, offsets, feature_tables,
                      feature_policies);
  const FeatureArgs& features = planned.features;
  PolicyArgs policies =
      policy_args(call, index, policy, clock, sketch, feature_tables, feature_policies);
  const bool by_policy = policies.rows != nullptr;
  int64_t* evicted_rows = evicted_tensor(call, evicted);
  const bool* admitted = admit_tensor(call, admit, features.count, by_policy);
  const SlabArgs slab_args{static_cast<int64_t*>(slabs.data_ptr()),
                           static_cast<const int64_t*>(free_rows.data_ptr()), free_rows.size(1),
                           slabs.size(0)};
  const auto group = group_memory(call, buckets);
  InsertionRoom room =
      prepare_insertion(call, group.get(), feature_tables, feature_policies, features.count);
  if (group == nullptr) room.old_buckets = buckets.size(0);

  const int64_t slots = dedupe_slots(features.count);
  const auto position_part = planned.scratch.add<int32_t>(features.count);
  std::optional<PolicyParts> parts;
  const bool ranked = policies_differ(feature_tables, feature_policies, index.table_count);
  if (by_policy) parts.emplace(&planned.scratch, features.count, slots, planned.blocks, ranked);
  planned.start(call);
  policies.of_feature = planned.feature_policy;
  const Plan& plan = planned.plan;
  const DedupeTable& dedupe = planned.dedupe;
  const int64_t rank_threads = planned.blocks * kRankBlock;
  int32_t* new_positions = planned.scratch.get(position_part);
  Tensor handles = call.empty({features.count}, ScalarType::Long);
  auto* handle = static_cast<int64_t*>(handles.data_ptr());
  auto* cells = static_cast<int32_t*>(sketch.data_ptr());
  NewIds new_ids{};
  int32_t* placed_counts = nullptr;
  if (by_policy) {
    const Scratch& scratch = planned.scratch;
    unsigned long long* ranks = ranked ? scratch.get(parts->ranks) : nullptr;
    new_ids = {
        scratch.get(parts->occurrences),  scratch.get(parts->wanted),   ranks,
        ranked ? ranks + slots : nullptr, scratch.get(parts->verdicts), scratch.get(parts->counts)};
    placed_counts = scratch.get(parts->placed_counts);
    call.fill(new_ids.occurrences, 0, slots * 4);
    if (admitted != nullptr) call.fill(new_ids.wanted, 0, slots);
    if (ranked) call.fill(ranks, 0, 2 * slots * 8);
  }

  const int64_t threads = features.threads();
  call.launch(by_policy ? find_or_claim<true> : find_or_claim<false>, threads, 0, index, features,
              error_sink(call), policies, dedupe, new_ids, admitted, plan, threads, handle);
  if (by_policy) {
    decide_admission(call, index, policies, planned, new_ids, admitted != nullptr, cells, handle,
                     placed_counts);
  } else {
    count_distinct(call, planned, handle);
  }
  // The plan changes the tables: all memory must have been allocated before.
  Scratch old_scratch;
  OldIndexParts old_parts{};
  if (room.growth) {
    old_parts = add_old_index(&old_scratch, room.old_buckets, index.score_words);
    old_scratch.allocate(call);
  }
  if (!room.mapped) {
    map_exactly(call, group.get(), count_exactly(call, plan, feature_tables, index.table_count));
  }
  decide_insertion(call, index, policies, slab_args, planned, shared_words(group.get()), room,
                   placed_counts);
  if (by_policy) {
    const Scratch& scratch = planned.scratch;
    const PlacedIds placed{index,
                           features,
                           policies,
                           new_positions,
                           scratch.get(parts->feature),
                           scratch.get(parts->stored),
                           scratch.get(parts->placed_occurrences),
                           ranked ? scratch.get(parts->expires) : nullptr};
    // before the counters are rehashed, while their positions are known
    give_admitted_rows(call, slab_args, planned, new_ids, cells, handle, placed_counts, placed);
    if (room.growth) {
      rehash(call, index, plan, old_scratch, old_parts, room.old_buckets, room.expected);
    }
    evict(call, planned, {evicted_rows, evicted.size(0) - 1}, placed, scratch.get(parts->victims),
          new_ids.counts, cells, handle);
    call.launch_strided(claim_new<PlacedIds>, features.count, placed, plan);
    call.launch_strided(settle_new<PlacedIds>, features.count, placed, plan);
  } else {
    if (room.growth) {
      rehash(call, index, plan, old_scratch, old_parts, room.old_buckets, room.expected);
    }
    call.launch(give_rows, rank_threads, kRankBlock, index, features, slab_args, dedupe, plan,
                planned.block_counts, handle, new_positions);
    const NewEntries entries{index, features, new_positions, handle, policies.clock};
    call.launch_strided(claim_new<NewEntries>, features.count, entries, plan);
    call.launch_strided(settle_new<NewEntries>, features.count, entries, plan);
  }
  call.launch(by_policy ? finish_handles<true> : finish_handles<false>, features.count, 0, index,
              features, dedupe, plan, handle);
  return handles;
}

}  // namespace
}  // namespace dynemb::cuda

DYNEMB_IMPLEMENT_OPS(m) { m.impl("find_or_insert_", TORCH_BOX(&dynemb::cuda::find_or_insert_)); }
