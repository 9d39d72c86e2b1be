#include "cpu/storage/cache.h"

#include <algorithm>
#include <string>

#include "core/storage/victims.h"
#include "cpu/memory/reserve.h"
#include "cpu/storage/find_slots.h"
#include "cpu/storage/slots.h"
#include "cpu/storage/victims.h"

namespace dynemb::cpu {
namespace {

constexpr int32_t kWanted = -1;  // place of a row that is about to get a slot
constexpr size_t kAhead = 16;    // missing rows between the fetch of a line and its use
constexpr int64_t kCheckedMemory = int64_t{64} << 20;  // step in which memory is checked

int32_t place_of(const CacheSlab& cache, int64_t handle) {
  return __atomic_load_n(cache.places + handle_row(handle), __ATOMIC_RELAXED);
}

// Raises for a place that is neither a slot nor one of the special values.
int32_t check_place(const char* op, const CacheSlab& cache, int64_t handle) {
  const int32_t place = place_of(cache, handle);
  DYNEMB_CHECK((place >= 0 && place <= cache.clock[kTierUsed]) || place == kSavedPlace,
               "dynemb::", op, ": places[", handle_row(handle), "] is ", place, ", expected 0 to ",
               cache.clock[kTierUsed], ", or ", kSavedPlace);
  return place;
}

// Raises for a handle without a row in its slab.
void check_handles(const StageCall& call, const std::vector<Tile>& tiles) {
  for (const Tile& tile : tiles) {
    const CacheSlab& cache =
        call.tiers->slabs[static_cast<size_t>(call.slab_of[static_cast<size_t>(tile.table)])];
    if (cache.places == nullptr) continue;
    int64_t last = 0;
    for (int64_t i = tile.begin; i < tile.end; ++i) last = std::max(last, call.handles[i]);
    DYNEMB_CHECK(handle_row(last) < cache.max_rows, "dynemb::", call.op, ": a handle names row ",
                 handle_row(last), ", but the table has ", cache.max_rows, " rows");
  }
}

// Begins the epoch of a call, and that of its training step.
void begin_epoch(const StageCall& call) {
  int64_t* head = call.tiers->head;
  if (call.counted_as != kTierMisses) return;  // a prefetch belongs to the running step
  if (call.changes) head[kTierTraining] = 1;
  if (static_cast<uint32_t>(head[kTierEpoch]) != call.epoch) add_to(&head[kTierEpoch], 1);
}

// Raises if memory is short for untouched slots up to `slots`.
void check_slots(const char* op, const CacheSlab& cache, int64_t slots) {
  const int64_t bytes = cache.clock[kTierSlotBytes];
  const int64_t before = cache.clock[kTierUsed] * bytes / kCheckedMemory;
  const int64_t after = slots * bytes / kCheckedMemory;
  if (after > before) check_available_memory(op, (after - before) * kCheckedMemory);
}

// Raises unless the slots that `wanted` rows get from the stack are free.
void check_free_slots(const char* op, const CacheSlab& cache, int64_t wanted) {
  const int64_t count = cache.clock[kTierFreeCount];
  for (int64_t i = count - std::min(wanted, count); i < count; ++i) {
    const int64_t slot = cache.free_slots[i];
    DYNEMB_CHECK(
        slot >= 0 && slot < cache.clock[kTierUsed] && slot_at(cache, slot)[kSlotOwner] <= 0,
        "dynemb::", op, ": free_slots[", i, "] is ", slot,
        ", expected a slot without a row, below ", cache.clock[kTierUsed]);
  }
}

// Raises if free slots are damaged, or if memory is short for `wanted` rows, where the cache has to
// grow because all slots are in use.
void check_wanted(const StageCall& call, size_t slab, int64_t wanted) {
  const CacheSlab& cache = call.tiers->slabs[slab];
  const int64_t most = cache.clock[kTierUsed] + wanted - cache.clock[kTierFreeCount];
  DYNEMB_CHECK(most <= cache.max_rows, "dynemb::", call.op, ": the cache of slab ", slab,
               " may need ", most, " slots, but there are ", cache.max_rows);
  check_free_slots(call.op, cache, wanted);
  check_slots(call.op, cache, most);
}

// Slots of the missing rows of a slab, by the rank of their first occurrence.
class SlotsForMissing {
 public:
  // Allocates all memory, so that the other functions raise nothing.
  SlotsForMissing(const CacheSlab& cache, int64_t wanted)
      : cache_(cache),
        wanted_(wanted),
        victims_(cache, wanted == 0 ? 0 : wanted_victims(cache.clock, wanted)) {}
  // Takes rows out of their slots if free ones do not suffice.
  void supply(uint32_t epoch, int64_t job, std::vector<RowMove>* saves) {
    if (wanted_ == 0) return;
    const int64_t victims = wanted_victims(cache_.clock, wanted_);
    if (victims > 0) victims_.take(epoch, victims, job, saves);
    supply_ = slot_supply(cache_.clock, static_cast<int64_t>(victims_.slots().size()));
  }
  int64_t next() {
    return slot_of_rank(supply_, rank_++, cache_.free_slots, victims_.slots().data());
  }
  // Removes the given slots from the stack, then pushes those of victims that are left, in the
  // order in which later calls give them.
  void finish() {
    if (wanted_ == 0) return;
    const SlotCounts given = given_slots(supply_, wanted_);
    cache_.clock[kTierFreeCount] -= given.free;
    cache_.clock[kTierUsed] += given.untouched;
    for (int64_t i = supply_.victims - 1; i >= given.victims; --i) {
      push_free_slot(cache_, victims_.slots()[static_cast<size_t>(i)]);
    }
  }

 private:
  const CacheSlab& cache_;
  int64_t wanted_;
  int64_t rank_ = 0;
  SlotSupply supply_{};
  VictimSearch victims_;
};

struct Missing {
  int64_t position;
  int64_t table;
  size_t slab;
  int32_t place;  // that the row had before the call
};

bool may_have_record(const StageCall& call, const Missing& missing) {
  if (call.overwritten != nullptr && call.overwritten[missing.position]) return false;
  if (call.jobs == nullptr || missing.place == kSavedPlace) return true;
  return call.jobs->has_record(missing.slab, call.handles[missing.position]);
}

void prefetch_place(const StageCall& call, const CacheSlab& cache, int64_t position) {
  __builtin_prefetch(cache.places + handle_row(call.handles[position]), 1);
}

void prefetch_missing(const StageCall& call, const Missing& missing) {
  prefetch_place(call, call.tiers->slabs[missing.slab], missing.position);
  if (call.jobs != nullptr) {
    call.jobs->prefetch_record(missing.slab, call.handles[missing.position]);
  }
}

// Puts a row into a slot without a row.
void put(const StageCall& call, const Missing& missing, int64_t slot, Plan* plan) {
  const CacheSlab& cache = call.tiers->slabs[missing.slab];
  const int64_t handle = call.handles[missing.position];
  int64_t* words = slot_at(cache, slot);
  const bool loads = may_have_record(call, missing);
  const int64_t job = loads && call.jobs != nullptr ? call.jobs->next : slot_job(words[kSlotMarks]);
  const int64_t generation = next_generation(slot_generation(words[kSlotMarks]));
  words[kSlotOwner] = handle + 1;
  words[kSlotId] = call.features->ids[missing.position];
  words[kSlotUse] = slot_use(call.epoch, call.counts ? 1 : 0);
  words[kSlotMarks] = slot_marks(missing.table, job, call.changes, generation);
  cache.places[handle_row(handle)] = static_cast<int32_t>(slot + 1);
  add_to(&cache.clock[call.counted_as], 1);
  add_to(&cache.clock[kTierTouches], 1);
  if (loads) plan->moves[missing.slab].loads.push_back(move_of(words, slot));
}

// The handle of the slot for a row that had none when the call began.
int64_t slot_of_missing(const StageCall& call, const Missing& missing, SlotsForMissing& slots,
                        Plan* plan) {
  const CacheSlab& cache = call.tiers->slabs[missing.slab];
  const int64_t handle = call.handles[missing.position];
  const int32_t place = place_of(cache, handle);
  int64_t slot = place - 1;
  if (place == kWanted) {
    slot = slots.next();
    put(call, missing, slot, plan);
  } else if (slot_at(cache, slot)[kSlotOwner] != handle + 1) {
    const int64_t owner = std::max<int64_t>(slot_at(cache, slot)[kSlotOwner], 1) - 1;
    if (row_status(handle, handle_generation(owner)) == RowStatus::kStale) {
      add_to(&cache.clock[kTierStale], 1);
      return kPaddingHandle;  // reads zeros, and gets no gradient
    }
    // the row has a new owner, so the content of its slot is stale
    put(call, missing, slot, plan);
  } else if (call.counted_as == kTierMisses) {
    add_to(&cache.clock[kTierHits], 1);
  }
  const int64_t* words = slot_at(cache, slot);
  if (call.jobs != nullptr) {
    const int64_t job =
        unfinished_job(slot_job(words[kSlotMarks]), call.jobs->done, call.jobs->next);
    plan->wait_for = std::max(plan->wait_for, job);
  }
  return make_handle(slot, slot_generation(words[kSlotMarks]));
}

}  // namespace

int64_t most_saves(const CacheSlab& cache, int64_t wanted) {
  if (wanted == 0) return 0;
  return std::min(wanted_victims(cache.clock, wanted),
                  cache.clock[kTierUsed] - cache.clock[kTierFreeCount]);
}

Plan plan_moves(const StageCall& call, const RoomCheck& check_room, int64_t* slot_handles) {
  const std::vector<Tile> tiles = make_tiles(*call.features);
  check_handles(call, tiles);
  begin_epoch(call);
  std::vector<TileOutcome> outcomes(tiles.size());
  parallel_units(static_cast<int64_t>(tiles.size()), call.features->count,
                 [&](int64_t begin, int64_t end) {
                   const bool all = end - begin == static_cast<int64_t>(tiles.size());
                   const Threads threads = all ? Threads::kOne : Threads::kSeveral;
                   RecentSlots recent;
                   for (int64_t t = begin; t < end; ++t) {
                     find_slots(call, tiles[static_cast<size_t>(t)], threads, recent, slot_handles,
                                &outcomes[static_cast<size_t>(t)]);
                   }
                 });
  Plan plan{std::vector<SlabMoves>(call.tiers->slabs.size()), 0};
  std::vector<SlabMoves>& moves = plan.moves;
  std::vector<Missing> missing;
  std::vector<int64_t> wanted(moves.size(), 0);
  for (size_t t = 0; t < tiles.size(); ++t) {
    const int64_t bad = outcomes[t].bad;
    if (bad < 0) continue;
    const auto slab = static_cast<size_t>(call.slab_of[static_cast<size_t>(tiles[t].table)]);
    check_place(call.op, call.tiers->slabs[slab], call.handles[bad]);
  }
  for (size_t t = 0; t < tiles.size(); ++t) {
    const auto slab = static_cast<size_t>(call.slab_of[static_cast<size_t>(tiles[t].table)]);
    const CacheSlab& cache = call.tiers->slabs[slab];
    if (call.counted_as == kTierMisses) add_to(&cache.clock[kTierHits], outcomes[t].hits);
    add_to(&cache.clock[kTierTouches], outcomes[t].touches);
    plan.wait_for = std::max(plan.wait_for, outcomes[t].wait_for);
    const std::vector<int32_t>& positions = outcomes[t].missing;
    for (size_t k = 0; k < positions.size(); ++k) {
      if (k + kAhead < positions.size()) prefetch_place(call, cache, positions[k + kAhead]);
      const int32_t position = positions[k];
      int32_t* place = cache.places + handle_row(call.handles[position]);
      missing.push_back({position, tiles[t].table, slab, *place});
      if (*place == 0 || *place == kSavedPlace) {
        *place = kWanted;
        ++wanted[slab];
      } else if (*place > 0) {
        touch(call, slot_at(cache, *place - 1),
              Threads::kOne);  // of the row's earlier owner: it must not move
      }
    }
  }
  if (missing.empty()) return plan;
  std::vector<SlotsForMissing> slots;
  try {
    std::vector<int64_t> saves(moves.size());
    for (size_t s = 0; s < moves.size(); ++s) {
      if (wanted[s] > 0) check_wanted(call, s, wanted[s]);
      slots.emplace_back(call.tiers->slabs[s], wanted[s]);
      saves[s] = most_saves(call.tiers->slabs[s], wanted[s]);
    }
    check_room(saves);
    for (size_t s = 0; s < moves.size(); ++s) {
      moves[s].saves.reserve(static_cast<size_t>(saves[s]));  // from here on nothing may fail
      moves[s].loads.reserve(missing.size());
    }
  } catch (...) {
    for (const Missing& m : missing) {
      int32_t* place = call.tiers->slabs[m.slab].places + handle_row(call.handles[m.position]);
      if (*place == kWanted && m.place != kWanted) *place = m.place;
    }
    throw;
  }
  const auto now = static_cast<uint32_t>(call.tiers->head[kTierEpoch]);
  const int64_t job = call.jobs == nullptr ? 0 : call.jobs->next;
  for (size_t s = 0; s < moves.size(); ++s) slots[s].supply(now, job, &moves[s].saves);
  for (size_t k = 0; k < missing.size(); ++k) {
    if (k + kAhead < missing.size()) prefetch_missing(call, missing[k + kAhead]);
    const Missing& m = missing[k];
    slot_handles[m.position] = slot_of_missing(call, m, slots[m.slab], &plan);
  }
  for (SlotsForMissing& of_slab : slots) of_slab.finish();
  for (const CacheSlab& cache : call.tiers->slabs) {
    const int64_t in_use = cache.clock[kTierUsed] - cache.clock[kTierFreeCount];
    cache.clock[kTierMostUsed] = std::max(cache.clock[kTierMostUsed], in_use);
  }
  return plan;
}

std::vector<RowMove> take_dirty(const TierTensors& tiers, const CacheSlab& cache, int64_t begin,
                                int64_t most) {
  const bool in_a_step = tiers.head[kTierTraining] != 0;
  const auto epoch = static_cast<uint32_t>(tiers.head[kTierEpoch]);
  std::vector<RowMove> saves;
  for (int64_t slot = begin;
       slot < cache.clock[kTierUsed] && static_cast<int64_t>(saves.size()) < most; ++slot) {
    int64_t* words = slot_at(cache, slot);
    if (words[kSlotOwner] <= 0 || !slot_is_dirty(words[kSlotMarks])) continue;
    saves.push_back(move_of(words, slot));
    // the backward of a lookup of this step may still change the row, without setting the dirty bit
    const bool will_change = in_a_step && !epoch_is_past(use_epoch(words[kSlotUse]), epoch);
    if (!will_change) words[kSlotMarks] &= ~kSlotDirty;
    add_to(&cache.clock[kTierWritten], 1);
  }
  return saves;
}

std::vector<RowMove> shrink(const CacheSlab& cache, int64_t limit) {
  std::vector<RowMove> saves;
  if (cache.clock[kTierUsed] <= limit) return saves;
  for (int64_t slot = limit; slot < cache.clock[kTierUsed]; ++slot) {
    if (slot_at(cache, slot)[kSlotOwner] > 0) evict(cache, slot, 0, &saves);
  }
  cache.clock[kTierUsed] = limit;
  cache.clock[kTierCursor] = std::min(cache.clock[kTierCursor], limit);
  cache.clock[kTierFreeCount] = 0;
  for (int64_t slot = limit - 1; slot >= 0; --slot) {
    if (slot_at(cache, slot)[kSlotOwner] <= 0) push_free_slot(cache, slot);
  }
  return saves;
}

void forget(const char* op, const CacheSlab& cache, const int64_t* handles, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    DYNEMB_CHECK(handles[i] >= 0, "dynemb::", op, ": handles[", i, "] is ", handles[i],
                 ", expected the handle of a row");
    DYNEMB_CHECK(handle_row(handles[i]) < cache.max_rows, "dynemb::", op, ": a handle names row ",
                 handle_row(handles[i]), ", but the table has ", cache.max_rows, " rows");
    check_place(op, cache, handles[i]);
  }
  for (int64_t i = 0; i < count; ++i) {
    const int32_t place = place_of(cache, handles[i]);
    cache.places[handle_row(handles[i])] = 0;
    if (place <= 0) continue;
    int64_t* words = slot_at(cache, place - 1);
    if (words[kSlotOwner] <= 0) continue;  // another place named the slot, too: damaged
    DYNEMB_CHECK(cache.clock[kTierFreeCount] < cache.clock[kTierUsed], "dynemb::", op,
                 ": slots has fewer free ones than tier_clock says");
    clear_slot(words);
    push_free_slot(cache, place - 1);
  }
}

}  // namespace dynemb::cpu
