#include "cpu/storage/cache.h"

#include <algorithm>
#include <iterator>
#include <string>

#include "core/storage/victims.h"
#include "cpu/memory/reserve.h"
#include "cpu/storage/slots.h"
#include "cpu/storage/victims.h"

namespace dynemb::cpu {
namespace {

constexpr int64_t kBlock = 64;   // ids with places, then slots, in flight together
constexpr int32_t kWanted = -1;  // place of a row that is about to get a slot
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

// Whether one thread or several look up the ids of a call. Several may use one row: the outcome is
// the same, but only one thread can do without locks.
enum class Threads { kOne, kSeveral };

// Returns whether this is the first use of the epoch.
bool touch(const StageCall& call, int64_t* slot, Threads threads) {
  const int64_t marks = __atomic_load_n(slot + kSlotMarks, __ATOMIC_RELAXED);
  if (call.changes && !slot_is_dirty(marks)) {
    if (threads == Threads::kOne) {
      __atomic_store_n(slot + kSlotMarks, marks | kSlotDirty, __ATOMIC_RELAXED);
    } else {
      __atomic_fetch_or(slot + kSlotMarks, kSlotDirty, __ATOMIC_RELAXED);
    }
  }
  int64_t use = __atomic_load_n(slot + kSlotUse, __ATOMIC_RELAXED);
  if (!epoch_is_past(use_epoch(use), call.epoch)) return false;
  const uint32_t count = use_count(use);
  const bool more = call.counts && count < UINT32_MAX;
  const int64_t next = slot_use(call.epoch, count + (more ? 1 : 0));
  if (threads == Threads::kOne) {
    __atomic_store_n(slot + kSlotUse, next, __ATOMIC_RELAXED);
    return true;
  }
  return __atomic_compare_exchange_n(slot + kSlotUse, &use, next, false, __ATOMIC_RELAXED,
                                     __ATOMIC_RELAXED);
}

struct TileOutcome {
  std::vector<int32_t> missing;  // positions
  int64_t hits = 0;
  int64_t touches = 0;
  int64_t wait_for = 0;
  int64_t bad = -1;  // position of a row with an invalid place
};

// The job to wait for before the row of a slot is read and changed.
int64_t job_before_use(const StageCall& call, const int64_t* words) {
  const Jobs* jobs = call.jobs;
  if (jobs == nullptr || jobs->next == jobs->done + 1) return 0;
  const int64_t marks = __atomic_load_n(words + kSlotMarks, __ATOMIC_RELAXED);
  return unfinished_job(slot_job(marks), jobs->done, jobs->next - 1);
}

// Slots of rows that a thread has found in this call. A batch repeats many of its ids, and these
// need neither their place nor their slot a second time.
class RecentSlots {
 public:
  // Starts with rows of another slab.
  void begin(const CacheSlab& cache) {
    if (places_ == cache.places) return;
    places_ = cache.places;
    std::fill(std::begin(handles_), std::end(handles_), kNoHandle);
  }
  // The handle of the row's slot in `out`, if it is known.
  bool find(int64_t handle, int64_t* out) const {
    const auto at = static_cast<size_t>(handle_row(handle)) % kRecent;
    *out = slots_[at];
    return handles_[at] == handle;
  }
  void add(int64_t handle, int64_t slot_handle) {
    const auto at = static_cast<size_t>(handle_row(handle)) % kRecent;
    handles_[at] = handle;
    slots_[at] = slot_handle;
  }

 private:
  static constexpr size_t kRecent = 4096;  // 64 KB: in a second-level cache

  const int32_t* places_ = nullptr;
  int64_t handles_[kRecent];
  int64_t slots_[kRecent];
};

void find_slots(const StageCall& call, const Tile& tile, Threads threads, RecentSlots& recent,
                int64_t* out, TileOutcome* outcome) {
  const CacheSlab& cache =
      call.tiers->slabs[static_cast<size_t>(call.slab_of[static_cast<size_t>(tile.table)])];
  const int64_t* handles = call.handles;
  if (cache.places == nullptr) {
    std::copy(handles + tile.begin, handles + tile.end, out + tile.begin);
    return;
  }
  recent.begin(cache);
  int64_t left[kBlock];  // positions of ids that are not in RecentSlots
  int32_t place[kBlock];
  for (int64_t begin = tile.begin; begin < tile.end; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, tile.end);
    int64_t count = 0;
    for (int64_t i = begin; i < end; ++i) {
      if (handles[i] < 0) {
        out[i] = handles[i];
      } else if (recent.find(handles[i], out + i)) {
        ++outcome->hits;
      } else {
        left[count++] = i;
        __builtin_prefetch(cache.places + handle_row(handles[i]));
      }
    }
    for (int64_t k = 0; k < count; ++k) {
      place[k] = place_of(cache, handles[left[k]]);
      if ((place[k] < 0 && place[k] != kSavedPlace) || place[k] > cache.clock[kTierUsed]) {
        outcome->bad = left[k];
        return;
      }
      if (place[k] > 0) __builtin_prefetch(slot_at(cache, place[k] - 1), 1);
    }
    for (int64_t k = 0; k < count; ++k) {
      const int64_t i = left[k];
      const int64_t slot = place[k] - 1;
      if (slot >= 0 && slot_at(cache, slot)[kSlotOwner] == handles[i] + 1) {
        outcome->touches += touch(call, slot_at(cache, slot), threads);
        outcome->wait_for = std::max(outcome->wait_for, job_before_use(call, slot_at(cache, slot)));
        ++outcome->hits;
        out[i] = make_handle(slot, slot_generation(slot_at(cache, slot)[kSlotMarks]));
        recent.add(handles[i], out[i]);
      } else {
        outcome->missing.push_back(static_cast<int32_t>(i));
      }
    }
  }
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
  SlotsForMissing(const CacheSlab& cache, int64_t wanted) : cache_(cache), wanted_(wanted) {
    victims_.reserve(static_cast<size_t>(most_saves(cache, wanted)));
  }
  // Takes rows out of their slots if free ones do not suffice.
  void supply(uint32_t epoch, int64_t job, std::vector<RowMove>* saves) {
    if (wanted_ == 0) return;
    const int64_t victims = wanted_victims(cache_.clock, wanted_);
    if (victims > 0) take_victims(cache_, epoch, victims, job, &victims_, saves);
    supply_ = slot_supply(cache_.clock, static_cast<int64_t>(victims_.size()));
  }
  int64_t next() { return slot_of_rank(supply_, rank_++, cache_.free_slots, victims_.data()); }
  // Removes the given slots from the stack, then pushes those of victims that are left, in the
  // order in which later calls give them.
  void finish() {
    if (wanted_ == 0) return;
    const SlotCounts given = given_slots(supply_, wanted_);
    cache_.clock[kTierFreeCount] -= given.free;
    cache_.clock[kTierUsed] += given.untouched;
    for (int64_t i = supply_.victims - 1; i >= given.victims; --i) {
      push_free_slot(cache_, victims_[static_cast<size_t>(i)]);
    }
  }

 private:
  const CacheSlab& cache_;
  int64_t wanted_;
  int64_t rank_ = 0;
  SlotSupply supply_{};
  std::vector<int32_t> victims_;
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
    for (const int32_t position : outcomes[t].missing) {
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
  for (const Missing& m : missing) {
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
