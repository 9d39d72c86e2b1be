// Ops that plan the moves of a cache's rows; the caller does the moves.
#include <torch/csrc/stable/library.h>

#include <tuple>
#include <vector>

#include "cpu/index/one_writer.h"
#include "cpu/storage/stage_call.h"

namespace dynemb::cpu {
namespace {

int64_t* write_moves(size_t slab, int64_t loads, const std::vector<RowMove>& moves, int64_t* row) {
  for (const RowMove& move : moves) {
    row[kMoveSlab] = static_cast<int64_t>(slab);
    row[kMoveLoads] = loads;
    row[kMoveSlot] = move.slot;
    row[kMoveHandle] = move.handle;
    row[kMoveId] = move.id;
    row[kMoveTable] = move.table;
    row[kMoveGeneration] = move.generation;
    row += kMoveColumns;
  }
  return row;
}

// All saves precede all loads.
Tensor moves_tensor(const std::vector<SlabMoves>& planned) {
  size_t count = 0;
  for (const SlabMoves& of_slab : planned) count += of_slab.saves.size() + of_slab.loads.size();
  Tensor moves = empty_cpu({static_cast<int64_t>(count), kMoveColumns}, ScalarType::Long);
  auto* row = static_cast<int64_t*>(moves.data_ptr());
  for (size_t s = 0; s < planned.size(); ++s) row = write_moves(s, 0, planned[s].saves, row);
  for (size_t s = 0; s < planned.size(); ++s) row = write_moves(s, 1, planned[s].loads, row);
  return moves;
}

std::tuple<Tensor, Tensor> plan_moves_(std::vector<Tensor> places, std::vector<Tensor> slots,
                                       std::vector<Tensor> free_slots, Tensor tier_clock,
                                       Tensor meta, Tensor ids, Tensor handles, Tensor offsets,
                                       std::vector<int64_t> feature_tables, bool trains,
                                       int64_t ahead) {
  const char* op = "plan_moves_";
  const TierTensors tiers = tier_tensors(op, places, slots, free_slots, tier_clock);
  const OneWriter writer(op, tiers.head);
  const StagedIds given{meta, ids, handles, offsets, feature_tables};
  const FeatureArgs features = staged_features(op, given);
  const StageCall call = ahead == 0 ? lookup_call(op, tiers, features, given, trains)
                                    : prefetch_call(op, tiers, features, given, ahead);
  Tensor slot_handles = empty_cpu({features.count}, ScalarType::Long);
  const auto no_check = [](const std::vector<int64_t>&) {};
  const Plan plan = plan_moves(call, no_check, static_cast<int64_t*>(slot_handles.data_ptr()));
  return {slot_handles, moves_tensor(plan.moves)};
}

Tensor moves_of_slab(size_t slabs, int64_t slab, std::vector<RowMove> saves) {
  std::vector<SlabMoves> moves(slabs);
  moves[static_cast<size_t>(slab)].saves = std::move(saves);
  return moves_tensor(moves);
}

Tensor take_dirty_(std::vector<Tensor> places, std::vector<Tensor> slots,
                   std::vector<Tensor> free_slots, Tensor tier_clock, int64_t slab, int64_t begin,
                   int64_t most) {
  const char* op = "take_dirty_";
  const TierTensors tiers = tier_tensors(op, places, slots, free_slots, tier_clock);
  const OneWriter writer(op, tiers.head);
  const CacheSlab& cache = cached_slab(op, tiers, slab);
  DYNEMB_CHECK(begin >= 0, "dynemb::", op, ": begin is ", begin, ", expected a slot");
  DYNEMB_CHECK(most >= 1, "dynemb::", op, ": most is ", most, ", expected 1 row at least");
  return moves_of_slab(tiers.slabs.size(), slab, take_dirty(tiers, cache, begin, most));
}

Tensor shrink_cache_(std::vector<Tensor> places, std::vector<Tensor> slots,
                     std::vector<Tensor> free_slots, Tensor tier_clock, int64_t slab,
                     int64_t limit) {
  const char* op = "shrink_cache_";
  const TierTensors tiers = tier_tensors(op, places, slots, free_slots, tier_clock);
  const OneWriter writer(op, tiers.head);
  const CacheSlab& cache = cached_slab(op, tiers, slab);
  DYNEMB_CHECK(limit >= 0, "dynemb::", op, ": limit is ", limit, ", expected 0 slots at least");
  return moves_of_slab(tiers.slabs.size(), slab, shrink(cache, limit));
}

void forget_rows_(std::vector<Tensor> places, std::vector<Tensor> slots,
                  std::vector<Tensor> free_slots, Tensor tier_clock, int64_t slab, Tensor handles) {
  const char* op = "forget_rows_";
  const TierTensors tiers = tier_tensors(op, places, slots, free_slots, tier_clock);
  const OneWriter writer(op, tiers.head);
  const CacheSlab& cache = cached_slab(op, tiers, slab);
  check_words(op, "handles", handles);
  forget(op, cache, static_cast<const int64_t*>(handles.data_ptr()), handles.numel());
}

}  // namespace
}  // namespace dynemb::cpu

STABLE_TORCH_LIBRARY_IMPL(dynemb, CPU, m) {
  m.impl("plan_moves_", TORCH_BOX(&dynemb::cpu::plan_moves_));
  m.impl("take_dirty_", TORCH_BOX(&dynemb::cpu::take_dirty_));
  m.impl("shrink_cache_", TORCH_BOX(&dynemb::cpu::shrink_cache_));
  m.impl("forget_rows_", TORCH_BOX(&dynemb::cpu::forget_rows_));
}

// For error messages about a GPU's tensors, also in builds without CUDA kernels.
STABLE_TORCH_LIBRARY_IMPL(dynemb, CUDA, m) {
  m.impl("plan_moves_", TORCH_BOX(&dynemb::cpu::plan_moves_));
  m.impl("take_dirty_", TORCH_BOX(&dynemb::cpu::take_dirty_));
  m.impl("shrink_cache_", TORCH_BOX(&dynemb::cpu::shrink_cache_));
  m.impl("forget_rows_", TORCH_BOX(&dynemb::cpu::forget_rows_));
}
