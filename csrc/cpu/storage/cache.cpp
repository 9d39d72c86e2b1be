#include "cpu/storage/cache.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <string>

#include "core/storage/cache.h"
#include "cpu/memory/reserve.h"

namespace dynemb::cpu {
namespace {

constexpr int64_t kBlock = 64;   // ids with places, then slots, in flight together
constexpr int32_t kWanted = -1;  // place of a row that is about to get a slot
constexpr int64_t kCheckedMemory = int64_t{64} << 20;  // step in which memory is checked

int64_t* slot_at(const CacheSlab& cache, int64_t slot) { return cache.slots + slot * kSlotColumns; }

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

// Adds to a counter; one at the limit, which only damage produces, stays there.
void add_to(int64_t* counter, int64_t more) {
  *counter = static_cast<int64_t>(static_cast<uint64_t>(*counter) + static_cast<uint64_t>(more));
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

// Frees a slot; its row has no place any more.
void free_slot(const CacheSlab& cache, int64_t slot) {
  int64_t* words = slot_at(cache, slot);
  words[kSlotOwner] = 0;
  words[kSlotId] = cache.clock[kTierFreeHead];
  words[kSlotMarks] =
      slot_marks(0, slot_job(words[kSlotMarks]), false, slot_generation(words[kSlotMarks]));
  cache.clock[kTierFreeHead] = slot + 1;
  ++cache.clock[kTierFreeCount];
}

RowMove move_of(const int64_t* words, int64_t slot) {
  return {slot, words[kSlotOwner] - 1, words[kSlotId], slot_table(words[kSlotMarks]),
          slot_generation(words[kSlotMarks])};
}

// Takes the row out of a slot. A dirty row is saved first, by job `job`, or 0: at once.
void evict(const CacheSlab& cache, int64_t slot, int64_t job, std::vector<RowMove>* saves) {
  int64_t* words = slot_at(cache, slot);
  int32_t place = 0;
  if (slot_is_dirty(words[kSlotMarks])) {
    saves->push_back(move_of(words, slot));
    add_to(&cache.clock[kTierWritten], 1);
    if (job > 0) {
      place = kSavedPlace;
      words[kSlotMarks] = slot_marks(0, job, false, slot_generation(words[kSlotMarks]));
    }
  }
  const int64_t row = handle_row(words[kSlotOwner] - 1);
  if (row < cache.max_rows && cache.places[row] == slot + 1) cache.places[row] = place;
  add_to(&cache.clock[kTierEvicted], 1);
  free_slot(cache, slot);
}

// Takes up to `wanted` rows of least worth out of their slots; among equals, those of the first
// slots.
void sweep(const CacheSlab& cache, uint32_t epoch, int64_t wanted, int64_t job,
           std::vector<RowMove>* saves) {
  std::array<int64_t, kWorths> having{};
  const int64_t used = cache.clock[kTierUsed];
  const bool halves = cache.clock[kTierTouches] >= kUsesBeforeHalving * cache.clock[kTierLimit];
  if (halves) cache.clock[kTierTouches] = 0;
  const auto may_go = [epoch](const int64_t* words) {
    return words[kSlotOwner] > 0 && epoch_is_past(use_epoch(words[kSlotUse]), epoch);
  };
  for (int64_t slot = 0; slot < used; ++slot) {
    int64_t* words = slot_at(cache, slot);
    if (halves)
      words[kSlotUse] = slot_use(use_epoch(words[kSlotUse]), use_count(words[kSlotUse]) / 2);
    if (may_go(words)) ++having[static_cast<size_t>(slot_worth(words[kSlotUse], epoch))];
  }
  int last = 0;
  int64_t below = 0;
  while (last < kWorths - 1 && below + having[static_cast<size_t>(last)] < wanted) {
    below += having[static_cast<size_t>(last)];
    ++last;
  }
  int64_t of_last = std::min(wanted - below, having[static_cast<size_t>(last)]);
  int64_t left = below + of_last;
  for (int64_t slot = 0; slot < used && left > 0; ++slot) {
    const int64_t* words = slot_at(cache, slot);
    if (!may_go(words)) continue;
    const int worth = slot_worth(words[kSlotUse], epoch);
    if (worth > last || (worth == last && of_last == 0)) continue;
    of_last -= worth == last;
    --left;
    evict(cache, slot, job, saves);
  }
}

// Raises if memory is short for untouched slots up to `slots`.
void check_slots(const char* op, const CacheSlab& cache, int64_t slots) {
  const int64_t bytes = cache.clock[kTierSlotBytes];
  const int64_t before = cache.clock[kTierUsed] * bytes / kCheckedMemory;
  const int64_t after = slots * bytes / kCheckedMemory;
  if (after > before) check_available_memory(op, (after - before) * kCheckedMemory);
}

// Number of rows that have to lose their slots so that `wanted` others get one.
int64_t victims_for(const CacheSlab& cache, int64_t wanted) {
  const int64_t* clock = cache.clock;
  const int64_t untouched = std::max<int64_t>(clock[kTierLimit] - clock[kTierUsed], 0);
  const int64_t missing = wanted - clock[kTierFreeCount] - untouched;
  return missing > 0 ? std::max(missing, clock[kTierLimit] / kSlotsPerSweep) : 0;
}

// Raises if memory is short for `wanted` rows, where the cache has to grow because all slots are in
// use.
void check_wanted(const StageCall& call, size_t slab, int64_t wanted) {
  const CacheSlab& cache = call.tiers->slabs[slab];
  const int64_t most = cache.clock[kTierUsed] + wanted - cache.clock[kTierFreeCount];
  DYNEMB_CHECK(most <= cache.max_rows, "dynemb::", call.op, ": the cache of slab ", slab,
               " may need ", most, " slots, but there are ", cache.max_rows);
  check_slots(call.op, cache, most);
}

int64_t take_slot(const char* op, const CacheSlab& cache) {
  int64_t* clock = cache.clock;
  const int64_t free = clock[kTierFreeHead] - 1;
  if (free >= 0) {
    const int64_t next = slot_at(cache, free)[kSlotId];
    clock[kTierFreeHead] = next >= 0 && next <= clock[kTierUsed] ? next : 0;
    --clock[kTierFreeCount];
    return free;
  }
  DYNEMB_CHECK(clock[kTierUsed] < cache.max_rows, "dynemb::", op, ": slots has fewer free ",
               "ones than tier_clock says");
  return clock[kTierUsed]++;
}

struct Missing {
  int64_t position;
  int64_t table;
  size_t slab;
  int32_t place;  // that the row had before the call
};

bool may_have_record(const StageCall& call, const Missing& missing) {
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
int64_t slot_of_missing(const StageCall& call, const Missing& missing, Plan* plan) {
  const CacheSlab& cache = call.tiers->slabs[missing.slab];
  const int64_t handle = call.handles[missing.position];
  const int32_t place = place_of(cache, handle);
  int64_t slot = place - 1;
  if (place == kWanted) {
    slot = take_slot(call.op, cache);
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
  return std::min(victims_for(cache, wanted), cache.clock[kTierUsed] - cache.clock[kTierFreeCount]);
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
  const auto now = static_cast<uint32_t>(call.tiers->head[kTierEpoch]);
  try {
    std::vector<int64_t> saves(moves.size());
    for (size_t s = 0; s < moves.size(); ++s) {
      if (wanted[s] > 0) check_wanted(call, s, wanted[s]);
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
  const int64_t job = call.jobs == nullptr ? 0 : call.jobs->next;
  for (size_t s = 0; s < moves.size(); ++s) {
    const CacheSlab& cache = call.tiers->slabs[s];
    const int64_t victims = wanted[s] > 0 ? victims_for(cache, wanted[s]) : 0;
    if (victims > 0) sweep(cache, now, victims, job, &moves[s].saves);
  }
  for (const Missing& m : missing) {
    slot_handles[m.position] = slot_of_missing(call, m, &plan);
  }
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
  cache.clock[kTierFreeHead] = 0;
  cache.clock[kTierFreeCount] = 0;
  for (int64_t slot = limit - 1; slot >= 0; --slot) {
    if (slot_at(cache, slot)[kSlotOwner] <= 0) free_slot(cache, slot);
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
    if (place > 0) free_slot(cache, place - 1);
  }
}

}  // namespace dynemb::cpu
