// stage_, staged_lookup_, prefetch_: slots of a cache in HBM for the rows of a call. What gets none
// is served at its home in host memory: nothing waits, grows or fails.
//
//   find_places    rows with a slot, and rows without one
//   claim_rows     of the positions of a missing row, the first one
//   number, plan   ranks of missing rows; slots are given by rank
//   VictimSearch   rows that lose their slots
//   give_slots     the missing rows' slots, or their homes
//   move_rows      out of the slots, and into them
//   write_handles  of missing rows
//
// Slabs without homes (take_slots.cu) report the moves to the host in place of move_rows.
//
// Only sums, minima and first uses are made by atomic operations, so no result depends on the order
// of threads. Rows change without being arguments, as on the CPU (cpu/storage/stage.cpp).
#include <algorithm>
#include <cub/device/device_scan.cuh>
#include <optional>

#include "core/storage/homes.h"
#include "cuda/index/args.h"
#include "cuda/rows/lookup.h"
#include "cuda/storage/moves.h"
#include "cuda/storage/stage.h"
#include "cuda/storage/victims.h"

namespace dynemb::cuda {
namespace {

enum Kind : int32_t {
  kSettled = 0,   // the handle is known, or of another slab
  kMissing = 1,   // the row has no slot
  kReplaced = 2,  // the row's slot is of its earlier owner
  kFirst = 4      // added to one of these: the first position of the row
};

struct StageJob {
  FeatureArgs features;
  const int64_t* meta;
  int64_t slab;
  const int64_t* handles;
  int64_t* out;
  CacheView cache;
  bool changes;   // whether rows will be changed
  bool counts;    // whether this use predicts later ones
  int64_t ahead;  // epochs until the lookup; 0: this is the lookup
  SlabReport report;
  int32_t* kind;  // [ids]
  int32_t* rank;  // [ids + 1]
  HomePlan* plan;
  int32_t* victims;
  StagedMove* moves;
  ErrorSink errors;

  __device__ uint32_t now() const { return static_cast<uint32_t>(cache.head[kTierEpoch]); }
  __device__ uint32_t epoch() const { return now() + static_cast<uint32_t>(ahead); }
  __device__ bool looks_up() const { return ahead == 0; }
  __device__ bool counts_known() const { return looks_up() && !report.repeated; }
  __device__ int32_t* place(int64_t i) const { return cache.places + handle_row(handles[i]); }
};

// One thread. A lookup without training between two steps begins an epoch of its own.
__global__ void begin_lookup(int64_t* head, bool trains) {
  if (thread_number() != 0) return;
  if (trains) {
    head[kTierTraining] = 1;
  } else if (head[kTierTraining] == 0) {
    ++head[kTierEpoch];
  }
}

// Returns whether this is the first use of the row in the epoch.
__device__ __forceinline__ bool touch(const StageJob& job, int64_t* words) {
  auto* marks = reinterpret_cast<unsigned long long*>(words + kSlotMarks);
  // an older value sets the bit again
  if (job.changes && !slot_is_dirty(load_racing(words + kSlotMarks))) {
    atomicOr(marks, static_cast<unsigned long long>(kSlotDirty));
  }
  const int64_t use = load_racing(words + kSlotUse);  // atomicCAS refuses an older value
  if (!epoch_is_past(use_epoch(use), job.epoch())) return false;
  const uint32_t count = use_count(use);
  const bool more = job.counts && count < UINT32_MAX;
  const int64_t next = slot_use(job.epoch(), count + (more ? 1 : 0));
  const auto expected = static_cast<unsigned long long>(use);
  return atomicCAS(reinterpret_cast<unsigned long long*>(words + kSlotUse), expected,
                   static_cast<unsigned long long>(next)) == expected;
}

// A thread per id: 16 bytes in order, 4 of its place and 32 of its slot at random.
__global__ void find_places(const __grid_constant__ StageJob job, int64_t threads) {
  const int64_t i = thread_number();
  if (i < threads) check_offset(job.features, job.errors, i);
  bool hit = false;
  bool touched = false;
  bool stale = false;
  bool at_home = false;
  int32_t kind = kSettled;
  const bool there = i < job.features.count;
  const int64_t handle = there ? job.handles[i] : kNoHandle;
  bool mine =
      handle >= 0 && job.meta[job.features.table_of(i) * kMetaColumns + kMetaSlab] == job.slab;
  if (mine && handle_row(handle) >= job.cache.max_rows) {
    job.errors.report(kErrorHandle, handle_row(handle));
    job.out[i] = kPaddingHandle;
    mine = false;
  }
  if (mine) {
    const int32_t place = *job.place(i);
    if (place > 0) {
      int64_t* words = job.cache.slot(place - 1);
      const int64_t owner = words[kSlotOwner];
      hit = owner == handle + 1;
      stale = !hit && row_status(handle, handle_generation(max(owner, int64_t{1}) - 1)) ==
                          RowStatus::kStale;
      if (hit) {
        touched = touch(job, words);
        // other threads change the dirty bit only
        job.out[i] = make_handle(place - 1, slot_generation(load_racing(words + kSlotMarks)));
      } else if (stale) {
        job.out[i] = kPaddingHandle;  // reads zeros, and gets no gradient
      } else {
        kind = kReplaced;
      }
    } else if (job.cache.has_homes && place == in_place(job.now())) {
      at_home = true;
      job.out[i] = home_handle(job.cache.most_slots, handle);
    } else {
      kind = kMissing;
    }
  }
  if (there) job.kind[i] = kind;
  int64_t* clock = job.cache.clock;
  count_by_key(hit && job.counts_known(), kTierHits, clock);
  count_by_key(touched, kTierTouches, clock);
  count_by_key(stale && !job.report.repeated, kTierStale, clock);
  count_by_key(at_home && job.looks_up(), kTierInPlace, job.cache.head);
}

// A thread per id: 12 bytes in order; of missing rows 4 or 8 at random.
__global__ void claim_rows(const __grid_constant__ StageJob job) {
  const int64_t i = thread_number();
  if (i >= job.features.count) return;
  if (job.kind[i] == kMissing) {
    atomicMin(job.place(i), place_claim(i));
  } else if (job.kind[i] == kReplaced) {
    int64_t* owner = job.cache.slot(*job.place(i) - 1) + kSlotOwner;
    atomicMin(reinterpret_cast<long long*>(owner), static_cast<long long>(owner_claim(i)));
  }
}

// The same. Flags the first positions of missing rows.
__global__ void flag_first_rows(const __grid_constant__ StageJob job) {
  const int64_t i = thread_number();
  if (i > job.features.count) return;
  bool missing = false;
  if (i < job.features.count && job.kind[i] != kSettled) {
    missing = job.kind[i] == kMissing && *job.place(i) == place_claim(i);
    const bool replaced =
        job.kind[i] == kReplaced && job.cache.slot(*job.place(i) - 1)[kSlotOwner] == owner_claim(i);
    if (missing || replaced) job.kind[i] += kFirst;
  }
  job.rank[i] = missing ? 1 : 0;
}

// One thread.
__global__ void plan_slots(const __grid_constant__ StageJob job) {
  if (thread_number() != 0) return;
  const bool whole = !job.cache.has_homes && job.looks_up();
  begin_home_plan(job.cache.clock, job.rank[job.features.count], whole, job.report.slots, job.plan);
  if (job.report.words == nullptr) return;
  job.report.words[kReportUsed] = job.cache.clock[kTierUsed];
  job.report.words[kReportFree] = job.cache.clock[kTierFreeCount];
}

// One thread.
__global__ void report_plan(const __grid_constant__ StageJob job) {
  if (thread_number() != 0) return;
  job.report.words[kReportWanted] = job.plan->wanted;
  job.report.words[kReportGiven] = job.plan->given;
  job.report.words[kReportVictims] = job.plan->victims;
}

__device__ __forceinline__ void put(const StageJob& job, int64_t i, int64_t* words) {
  const int64_t marks = words[kSlotMarks];
  words[kSlotOwner] = job.handles[i] + 1;
  words[kSlotId] = job.features.ids[i];
  words[kSlotUse] = slot_use(job.epoch(), job.counts ? 1 : 0);
  words[kSlotMarks] =
      slot_marks(job.features.table_of(i), 0, job.changes, next_generation(slot_generation(marks)));
}

// Returns whether the former row of the slot has to be saved.
__device__ __forceinline__ bool report_move(const StageJob& job, int64_t i, int64_t rank,
                                            const StagedMove& move, int64_t former_id) {
  volatile int64_t* words = job.report.words + kReportHead + rank * kMovedWords;
  const bool saves = move.owner > 0 && slot_is_dirty(move.marks) &&
                     job.cache.generations[move.slot] == slot_generation(move.marks);
  words[kMovedSlot] = move.slot;
  words[kMovedHandle] = move.handle;
  words[kMovedId] = job.features.ids[i];
  words[kMovedTable] = job.features.table_of(i);
  words[kMovedGeneration] = next_generation(slot_generation(move.marks));
  words[kMovedSaved] = saves ? move.owner - 1 : -1;
  words[kMovedSavedId] = former_id;
  words[kMovedSavedTable] = slot_table(move.marks);
  words[kMovedSavedGeneration] = slot_generation(move.marks);
  return saves;
}

// A thread per id: 12 bytes in order; of missing rows about 100 at random, once.
__global__ void give_slots(const __grid_constant__ StageJob job, TierColumn counted_as) {
  const int64_t i = thread_number();
  const int32_t kind = i < job.features.count ? job.kind[i] : kSettled;
  bool saves = false;
  if (kind == kMissing + kFirst) {
    const int64_t rank = job.rank[i];
    if (rank >= job.plan->given) {
      const bool at_home = job.cache.has_homes && job.looks_up();
      *job.place(i) = at_home ? in_place(job.now()) : 0;
    } else {
      const int64_t slot = slot_of_rank(job.plan->supply, rank, job.cache.free_slots, job.victims);
      int64_t* words = job.cache.slot(slot);
      const int64_t owner = words[kSlotOwner];
      job.moves[rank] = {slot, owner, words[kSlotMarks], job.handles[i]};
      if (job.report.words != nullptr) {
        saves = report_move(job, i, rank, job.moves[rank], words[kSlotId]);
      }
      if (owner > 0) {
        int32_t* left = job.cache.places + handle_row(owner - 1);
        if (*left == slot + 1) *left = 0;
      }
      put(job, i, words);
      *job.place(i) = static_cast<int32_t>(slot + 1);
    }
  } else if (kind == kReplaced + kFirst) {
    // the content of the slot is that of the earlier owner: the row is unwritten
    put(job, i, job.cache.slot(*job.place(i) - 1));
  }
  count_by_key(kind == kReplaced + kFirst, counted_as, job.cache.clock);
  count_by_key(kind == kReplaced + kFirst, kTierTouches, job.cache.clock);
  count_by_key(saves, kTierWritten, job.cache.clock);
}

// A thread per id: 12 bytes in order; of missing rows 36 at random.
__global__ void write_handles(const __grid_constant__ StageJob job) {
  const int64_t i = thread_number();
  const int32_t kind = i < job.features.count ? job.kind[i] : kSettled;
  bool hit = false;
  bool stale = false;
  bool at_home = false;
  if (kind != kSettled) {
    const int64_t handle = job.handles[i];
    const int32_t place = *job.place(i);
    at_home = place <= 0;
    if (at_home) {
      // without homes, the call is refused, and repeated
      job.out[i] = job.cache.has_homes ? home_handle(job.cache.most_slots, handle) : kNoHandle;
    } else {
      const int64_t* words = job.cache.slot(place - 1);
      stale = words[kSlotOwner] != handle + 1;
      hit = !stale && (kind & kFirst) == 0;
      job.out[i] =
          stale ? kPaddingHandle : make_handle(place - 1, slot_generation(words[kSlotMarks]));
    }
  }
  count_by_key(hit, kTierHits, job.cache.clock);
  count_by_key(stale, kTierStale, job.cache.clock);
  count_by_key(at_home && job.cache.has_homes, kTierInPlace, job.cache.head);
}

// Rows of one slab. `job` lacks scratch memory.
void stage_slab(const Call& call, StageJob job, TierColumn counted_as) {
  const int64_t ids = job.features.count;
  const int64_t most_given = std::min(ids, job.cache.most_slots);
  Scratch scratch;
  const VictimSearch search(call, &scratch, job.cache, ids);
  size_t scan_bytes = 0;
  const auto items = static_cast<int>(ids + 1);
  check_cuda(call.op, "numbering missing rows",
             cub::DeviceScan::ExclusiveSum(nullptr, scan_bytes, static_cast<int32_t*>(nullptr),
                                           static_cast<int32_t*>(nullptr), items, call.stream));
  const auto kind = scratch.add<int32_t>(ids);
  const auto rank = scratch.add<int32_t>(ids + 1);
  const auto plan = scratch.add<HomePlan>(1);
  const auto victims = scratch.add<int32_t>(most_given);
  const auto moves = scratch.add<StagedMove>(most_given);
  const auto temporary = scratch.add<char>(static_cast<int64_t>(scan_bytes));
  scratch.allocate(call);
  job.kind = scratch.get(kind);
  job.rank = scratch.get(rank);
  job.plan = scratch.get(plan);
  job.victims = scratch.get(victims);
  job.moves = scratch.get(moves);
  const int64_t threads = job.features.threads();
  call.launch(find_places, threads, 0, job, threads);
  call.launch(claim_rows, ids, 0, job);
  call.launch(flag_first_rows, ids + 1, 0, job);
  check_cuda(call.op, "numbering missing rows",
             cub::DeviceScan::ExclusiveSum(scratch.get(temporary), scan_bytes, job.rank, job.rank,
                                           items, call.stream));
  call.launch(plan_slots, 1, 1, job);
  search.run(call, scratch, job.cache, counted_as, job.plan, job.victims);
  if (job.report.words != nullptr) call.launch(report_plan, 1, 1, job);
  call.launch(give_slots, ids, 0, job, counted_as);
  if (job.cache.has_homes) move_rows(call, job.cache, job.plan, job.moves, most_given);
  if (job.ahead == 0) call.launch(write_handles, ids, 0, job);
}

}  // namespace

void stage_rows(const Call& call, const CachedGroup& group, const StagedIds& given, bool trains,
                int64_t ahead, const std::vector<SlabReport>& reports, const Tensor& out) {
  const auto memory = group.memory.lock();
  check_tensor(call, "meta", given.meta, ScalarType::Long);
  check_size(call.op, "meta", given.meta, 1, kMetaColumns);
  const int64_t tables = given.meta.size(0);
  Scratch scratch;
  const auto words = scratch.add<int64_t>(static_cast<int64_t>(given.feature_tables.size()));
  scratch.allocate(call);
  StageJob job{};
  job.features = feature_args(call, given.ids, given.offsets, given.feature_tables, tables,
                              scratch.get(words));
  const int64_t ids = job.features.count;
  DYNEMB_CHECK(ids < INT32_MAX, "dynemb::", call.op, ": ids has ", ids,
               " elements, expected less than ", INT32_MAX, ": split the batch");
  job.handles = id_words(call, "handles", given.handles, ids);
  DYNEMB_CHECK(tables <= kMostTables, "dynemb::", call.op, ": meta has ", tables,
               " tables, expected at most ", kMostTables, " where some have storage");
  job.out = static_cast<int64_t*>(out.data_ptr());
  job.meta = static_cast<const int64_t*>(given.meta.data_ptr());
  job.changes = trains;
  job.counts = trains || ahead > 0;
  job.ahead = ahead;
  job.errors = error_sink(call);
  upload_words(call, given.feature_tables, scratch.get(words));
  const bool repeated = std::any_of(reports.begin(), reports.end(),
                                    [](const SlabReport& report) { return report.repeated; });
  if (!repeated) call.copy(out.data_ptr(), given.handles.data_ptr(), ids * 8);
  if (ahead == 0 && !repeated) call.launch(begin_lookup, 1, 1, group.head, trains);
  for (size_t s = 0; s < group.slabs.size(); ++s) {
    const bool looked_up =
        std::any_of(given.feature_tables.begin(), given.feature_tables.end(),
                    [&](int64_t t) { return memory->slab_of_table(static_cast<size_t>(t)) == s; });
    if (!looked_up || group.slabs[s].most_slots == 0) continue;
    if (!reports.empty()) job.report = reports[s];
    if (!group.has_homes && job.report.words == nullptr) continue;
    job.slab = static_cast<int64_t>(s);
    job.cache = group.slabs[s];
    job.cache.dirty_bits = memory->dirty_bits(s);
    stage_slab(call, job, ahead == 0 ? kTierMisses : kTierPrefetched);
  }
}

namespace {

// Of rows with homes.
Tensor staged_handles(const Call& call, const CacheTensors& tiers, const StagedIds& given,
                      bool trains, int64_t ahead) {
  const auto group = cached_group(call, tiers);
  DYNEMB_CHECK(group->has_homes, "dynemb::", call.op,
               ": the rows lie in a store, which kernels cannot read: call take_slots_, and load "
               "the rows that it names");
  Tensor out = call.empty({given.ids.numel()}, ScalarType::Long);
  stage_rows(call, *group, given, trains, ahead, {}, out);
  return out;
}

Tensor stage_(std::vector<Tensor> places, std::vector<Tensor> slots, std::vector<Tensor> free_slots,
              Tensor tier_clock, Tensor meta, Tensor ids, Tensor handles, Tensor offsets,
              std::vector<int64_t> feature_tables, bool trains) {
  const Call call("stage_", "tier_clock", tier_clock);
  const CacheTensors tiers{places, slots, free_slots, tier_clock};
  const InOrder in_order(call, cached_group(call, tiers)->memory.lock()->order());
  return staged_handles(call, tiers, {meta, ids, handles, offsets, feature_tables}, trains, 0);
}

Tensor staged_lookup_(std::vector<Tensor> places, std::vector<Tensor> slots,
                      std::vector<Tensor> free_slots, Tensor tier_clock,
                      std::vector<Tensor> weights, std::vector<Tensor> generations, Tensor meta,
                      Tensor init_data, Tensor ids, Tensor handles, Tensor offsets,
                      std::optional<Tensor> per_sample_weights, std::vector<int64_t> feature_tables,
                      std::vector<int64_t> feature_dims, int64_t pooling) {
  const Call call("staged_lookup_", "tier_clock", tier_clock);
  const GroupRows rows = group_rows(call, weights, generations, meta, init_data);
  LookupCall lookup = lookup_call(call, rows, ids, handles, offsets, per_sample_weights,
                                  feature_tables, feature_dims, pooling);
  const CacheTensors tiers{places, slots, free_slots, tier_clock};
  const InOrder in_order(call, cached_group(call, tiers)->memory.lock()->order());
  const Tensor staged =
      staged_handles(call, tiers, {meta, ids, handles, offsets, feature_tables}, false, 0);
  lookup.args.handles = static_cast<const int64_t*>(staged.data_ptr());
  return run_lookup(call, rows, lookup);
}

void prefetch_(std::vector<Tensor> places, std::vector<Tensor> slots,
               std::vector<Tensor> free_slots, Tensor tier_clock, Tensor meta, Tensor ids,
               Tensor handles, Tensor offsets, std::vector<int64_t> feature_tables, int64_t ahead) {
  const Call call("prefetch_", "tier_clock", tier_clock);
  DYNEMB_CHECK(ahead >= 1 && ahead <= INT32_MAX, "dynemb::prefetch_: ahead is ", ahead,
               ", expected 1 at least: the steps until the rows are looked up");
  const CacheTensors tiers{places, slots, free_slots, tier_clock};
  const InOrder in_order(call, cached_group(call, tiers)->memory.lock()->order());
  staged_handles(call, tiers, {meta, ids, handles, offsets, feature_tables}, false, ahead);
}

}  // namespace
}  // namespace dynemb::cuda

DYNEMB_IMPLEMENT_OPS(m) {
  m.impl("stage_", TORCH_BOX(&dynemb::cuda::stage_));
  m.impl("staged_lookup_", TORCH_BOX(&dynemb::cuda::staged_lookup_));
  m.impl("prefetch_", TORCH_BOX(&dynemb::cuda::prefetch_));
}
