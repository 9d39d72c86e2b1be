// reserve_space_, stage_, prefetch_, stage_records_ and store_submit: moves of a lookup's rows
// between slots and an open store. Weights and state change without being arguments, through the
// addresses that the store knows. This is sound: no value of a row with a slot changes, and reading
// the others requires the handles that stage_ returns. Tensors without a store, such as copies,
// raise.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "core/columns.h"
#include "cpu/index/one_writer.h"
#include "cpu/rows/lookup.h"
#include "cpu/storage/registry.h"
#include "cpu/storage/stage_call.h"
#include "cpu/storage/wanted_rows.h"

namespace dynemb::cpu {
namespace {

bool moves_any(const std::vector<SlabMoves>& moves) {
  for (const SlabMoves& of_slab : moves) {
    if (!of_slab.saves.empty() || !of_slab.loads.empty()) return true;
  }
  return false;
}

bool are_at(const std::vector<TensorPlace>& opened, const std::vector<Tensor>& tensors) {
  return std::equal(opened.begin(), opened.end(), tensors.begin(), tensors.end(),
                    [](const TensorPlace& of, const Tensor& t) { return of.data == t.data_ptr(); });
}

struct TensorsOfSlots {
  const std::vector<Tensor>& places;
  const std::vector<Tensor>& slots;
  const std::vector<Tensor>& free_slots;
};

// The store that was opened for these tensors; copies of them have none.
std::shared_ptr<RegisteredStore> store_of_cache(const char* op, const Tensor& tier_clock,
                                                const TensorsOfSlots& given) {
  std::shared_ptr<RegisteredStore> entry = registered_store(op, tier_clock);
  DYNEMB_CHECK(are_at(entry->places, given.places) && are_at(entry->slots, given.slots) &&
                   are_at(entry->free_slots, given.free_slots),
               "dynemb::", op, ": places, slots and free_slots are not those that the store of ",
               "tier_clock was opened with: give the tensors of one group");
  return entry;
}

// The tensors that a store was opened with.
TierTensors tensors_of(const char* op, const RegisteredStore& entry, const Tensor& tier_clock) {
  check_size(op, "tier_clock", tier_clock, 0, entry.slabs() + 1);
  TierTensors tiers{{}, static_cast<int64_t*>(tier_clock.data_ptr())};
  for (size_t s = 0; s < entry.places.size(); ++s) {
    const int64_t rows = entry.places[s].size[0];
    int64_t* clock = tiers.head + (static_cast<int64_t>(s) + 1) * kTierColumns;
    tiers.slabs.push_back({rows > 0 ? static_cast<int32_t*>(entry.places[s].data) : nullptr, rows,
                           static_cast<int64_t*>(entry.slots[s].data),
                           static_cast<int32_t*>(entry.free_slots[s].data), clock});
  }
  return tiers;
}

// Queues the moves of a call; returns the job after which its rows may be used.
int64_t submit_moves(RowStore& store, StageCall call, int64_t* slot_handles) {
  const Jobs jobs{store.jobs_done(), store.jobs_submitted() + 1,
                  [&store](size_t slab, int64_t h) { return store.has_record(slab, h); },
                  [&store](size_t slab, int64_t h) { store.prefetch_record(slab, h); }};
  call.jobs = &jobs;
  const auto check_room = [&store](const std::vector<int64_t>& rows) { store.reserve_space(rows); };
  Plan plan = plan_moves(call, check_room, slot_handles);
  if (moves_any(plan.moves)) {
    store.submit(std::move(plan.moves));
  } else {
    store.cancel_reservation();
  }
  return plan.wait_for;
}

// Reserves disk space for the rows that a lookup pushes out of the cache, before the index changes:
// otherwise a repeated step would count its ids twice. Nothing is changed, but `tier_clock` and
// `tables` are declared as changed, so that compilers move this neither behind the insertion nor
// before the preceding lookup.
void reserve_space_(Tensor tier_clock, Tensor buckets, Tensor tables, Tensor meta, Tensor ids,
                    Tensor offsets, std::vector<int64_t> feature_tables) {
  const char* op = "reserve_space_";
  const auto entry = registered_store(op, tier_clock);
  const TierTensors tiers = tensors_of(op, *entry, tier_clock);
  const OneWriter writer(op, tiers.head);
  const IndexArgs index = index_args(op, buckets, nullptr, tables, meta);
  const FeatureArgs features = feature_args(op, ids, offsets, feature_tables, index.table_count);
  const std::vector<int64_t> slab_of = slabs_of_tables(op, meta, tiers.slabs.size());
  const auto saves = [&tiers](std::vector<int64_t> rows) {
    for (size_t s = 0; s < rows.size(); ++s) rows[s] = most_saves(tiers.slabs[s], rows[s]);
    return rows;
  };
  // usually there is space even if every id replaces a dirty row
  const std::vector<int64_t> most = saves(most_wanted_rows(tiers, features, slab_of));
  if (entry->store->reserve_ready_space(most)) return;
  entry->store->reserve_space(saves(wanted_rows(op, tiers, index, features, slab_of)));
  entry->store->expect_space(most);
}

// Reserves disk space for the rows that so many others, by slab, push out of the cache.
void reserve_saves_(Tensor tier_clock, std::vector<int64_t> rows) {
  const char* op = "reserve_saves_";
  const auto entry = registered_store(op, tier_clock);
  const TierTensors tiers = tensors_of(op, *entry, tier_clock);
  DYNEMB_CHECK(rows.size() == tiers.slabs.size(), "dynemb::", op, ": rows has ", rows.size(),
               " numbers, expected one for each of ", tiers.slabs.size(), " slabs");
  const OneWriter writer(op, tiers.head);
  for (size_t s = 0; s < rows.size(); ++s) {
    DYNEMB_CHECK(rows[s] >= 0 && (rows[s] == 0 || tiers.slabs[s].places != nullptr), "dynemb::", op,
                 ": rows[", s, "] is ", rows[s],
                 ", expected at least 0, and 0 for a slab without a log");
    rows[s] = most_saves(tiers.slabs[s], rows[s]);
  }
  entry->store->reserve_space(rows);
}

// Called by the thread that has locked the cache.
Tensor staged_handles(const char* op, const TierTensors& tiers, const TensorsOfSlots& tensors,
                      const Tensor& tier_clock, const StagedIds& given, bool trains) {
  const auto entry = store_of_cache(op, tier_clock, tensors);
  RowStore& store = *entry->store;
  store.check();
  const FeatureArgs features = staged_features(op, given);
  const StageCall call = lookup_call(op, tiers, features, given, trains);
  Tensor slot_handles = empty_cpu({features.count}, ScalarType::Long);
  const int64_t job = submit_moves(store, call, static_cast<int64_t*>(slot_handles.data_ptr()));
  store.wait_for(job);
  return slot_handles;
}

Tensor stage_(std::vector<Tensor> places, std::vector<Tensor> slots, std::vector<Tensor> free_slots,
              Tensor tier_clock, Tensor meta, Tensor ids, Tensor handles, Tensor offsets,
              std::vector<int64_t> feature_tables, bool trains) {
  const char* op = "stage_";
  const TierTensors tiers = tier_tensors(op, places, slots, free_slots, tier_clock);
  const OneWriter writer(op, tiers.head);
  return staged_handles(op, tiers, {places, slots, free_slots}, tier_clock,
                        {meta, ids, handles, offsets, feature_tables}, trains);
}

// Slots for rows that the caller copies before the next call: it reads some, and overwrites others,
// which are not loaded.
Tensor stage_records_(std::vector<Tensor> places, std::vector<Tensor> slots,
                      std::vector<Tensor> free_slots, Tensor tier_clock, Tensor meta, Tensor ids,
                      Tensor handles, Tensor offsets, std::vector<int64_t> feature_tables,
                      Tensor overwritten) {
  const char* op = "stage_records_";
  const TierTensors tiers = tier_tensors(op, places, slots, free_slots, tier_clock);
  const OneWriter writer(op, tiers.head);
  const auto entry = store_of_cache(op, tier_clock, {places, slots, free_slots});
  entry->store->check();
  const StagedIds given{meta, ids, handles, offsets, feature_tables};
  const FeatureArgs features = staged_features(op, given);
  check_tensor(CallContext(op), "overwritten", overwritten, ScalarType::Bool);
  check_length(op, "overwritten", overwritten, features.count);
  StageCall call = lookup_call(op, tiers, features, given, /*trains=*/false);
  call.counts = true;
  call.overwritten = static_cast<const bool*>(overwritten.data_ptr());
  Tensor slot_handles = empty_cpu({features.count}, ScalarType::Long);
  entry->store->wait_for(
      submit_moves(*entry->store, call, static_cast<int64_t*>(slot_handles.data_ptr())));
  return slot_handles;
}

// Rows of a lookup without training keep their slots for this call only, so the call also reads
// them: a compiler could move a read by handles behind the next stage_, and another thread may take
// the slots.
Tensor staged_lookup_(std::vector<Tensor> places, std::vector<Tensor> slots,
                      std::vector<Tensor> free_slots, Tensor tier_clock,
                      std::vector<Tensor> weights, std::vector<Tensor> generations, Tensor meta,
                      Tensor init_data, Tensor ids, Tensor handles, Tensor offsets,
                      std::optional<Tensor> per_sample_weights, std::vector<int64_t> feature_tables,
                      std::vector<int64_t> feature_dims, int64_t pooling) {
  const char* op = "staged_lookup_";
  const TierTensors tiers = tier_tensors(op, places, slots, free_slots, tier_clock);
  const OneWriter writer(op, tiers.head);  // until the rows have been read
  const Tensor slot_handles = staged_handles(op, tiers, {places, slots, free_slots}, tier_clock,
                                             {meta, ids, handles, offsets, feature_tables}, false);
  return read_rows(op, weights, generations, meta, init_data, ids, slot_handles, offsets,
                   per_sample_weights, feature_tables, feature_dims, pooling);
}

void prefetch_(std::vector<Tensor> places, std::vector<Tensor> slots,
               std::vector<Tensor> free_slots, Tensor tier_clock, Tensor meta, Tensor ids,
               Tensor handles, Tensor offsets, std::vector<int64_t> feature_tables, int64_t ahead) {
  const char* op = "prefetch_";
  const TierTensors tiers = tier_tensors(op, places, slots, free_slots, tier_clock);
  const OneWriter writer(op, tiers.head);
  const auto entry = store_of_cache(op, tier_clock, {places, slots, free_slots});
  entry->store->check();
  const StagedIds given{meta, ids, handles, offsets, feature_tables};
  const FeatureArgs features = staged_features(op, given);
  const StageCall call = prefetch_call(op, tiers, features, given, ahead);
  std::vector<int64_t> slot_handles(static_cast<size_t>(features.count));
  submit_moves(*entry->store, call, slot_handles.data());
}

void store_submit(Tensor tier_clock, Tensor moves) {
  const char* op = "store_submit";
  const auto entry = registered_store(op, tier_clock);
  RowStore& store = *entry->store;
  check_tensor(op, "moves", moves, ScalarType::Long);
  check_size(op, "moves", moves, 1, kMoveColumns);
  const auto slabs = tier_clock.size(0) - 1;
  std::vector<SlabMoves> job(static_cast<size_t>(slabs));
  const auto* rows = static_cast<const int64_t*>(moves.data_ptr());
  for (int64_t i = 0; i < moves.size(0); ++i) {
    const int64_t* row = rows + i * kMoveColumns;
    DYNEMB_CHECK(row[kMoveSlab] >= 0 && row[kMoveSlab] < slabs, "dynemb::", op, ": moves[", i,
                 "] is of slab ", row[kMoveSlab], ", expected 0 to ", slabs - 1);
    SlabMoves& of_slab = job[static_cast<size_t>(row[kMoveSlab])];
    (row[kMoveLoads] != 0 ? of_slab.loads : of_slab.saves)
        .push_back({row[kMoveSlot], row[kMoveHandle], row[kMoveId],
                    static_cast<int32_t>(row[kMoveTable]),
                    static_cast<int32_t>(row[kMoveGeneration])});
  }
  std::vector<int64_t> saves;
  for (const SlabMoves& of_slab : job) saves.push_back(static_cast<int64_t>(of_slab.saves.size()));
  store.reserve_space(saves);
  if (moves_any(job)) store.submit(std::move(job));
}

}  // namespace
}  // namespace dynemb::cpu

STABLE_TORCH_LIBRARY_IMPL(dynemb, CPU, m) {
  m.impl("reserve_space_", TORCH_BOX(&dynemb::cpu::reserve_space_));
  m.impl("reserve_saves_", TORCH_BOX(&dynemb::cpu::reserve_saves_));
  m.impl("stage_records_", TORCH_BOX(&dynemb::cpu::stage_records_));
  m.impl("stage_", TORCH_BOX(&dynemb::cpu::stage_));
  m.impl("staged_lookup_", TORCH_BOX(&dynemb::cpu::staged_lookup_));
  m.impl("prefetch_", TORCH_BOX(&dynemb::cpu::prefetch_));
  m.impl("store_submit", TORCH_BOX(&dynemb::cpu::store_submit));
}

// For error messages about a GPU's tensors, also in builds without CUDA kernels.
STABLE_TORCH_LIBRARY_IMPL(dynemb, CUDA, m) {
  m.impl("reserve_saves_", TORCH_BOX(&dynemb::cpu::reserve_saves_));
  m.impl("stage_records_", TORCH_BOX(&dynemb::cpu::stage_records_));
}
