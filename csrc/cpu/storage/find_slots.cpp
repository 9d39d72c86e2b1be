#include "cpu/storage/find_slots.h"

#include <algorithm>

#include "core/index/handle.h"
#include "cpu/storage/slots.h"

namespace dynemb::cpu {
namespace {

constexpr int64_t kBlock = 64;  // ids with places, or slots, that are fetched together
// While the slots of a block are in use, those of the next one and the places of the one after it
// are on their way.
constexpr int64_t kBlocks = 3;

struct Block {
  int64_t left;              // ids that are not in RecentSlots
  int64_t position[kBlock];  // of these
  int32_t place[kBlock];
};

inline bool touch_slot(const StageCall& call, int64_t* slot, Threads threads) {
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

// One tile of a call, with its blocks on their way.
class TileSearch {
 public:
  TileSearch(const StageCall& call, const CacheSlab& cache, Threads threads, RecentSlots& recent,
             int64_t* out, TileOutcome* outcome)
      : call_(call),
        cache_(cache),
        handles_(call.handles),
        threads_(threads),
        recent_(recent),
        out_(out),
        outcome_(outcome),
        waits_(call.jobs != nullptr && call.jobs->next != call.jobs->done + 1) {}

  void run(const Tile& tile) {
    const int64_t count = (tile.end - tile.begin + kBlock - 1) / kBlock;
    for (int64_t b = 0; b < count + kBlocks - 1; ++b) {
      if (b < count) {
        const int64_t begin = tile.begin + b * kBlock;
        find_recent(begin, std::min(begin + kBlock, tile.end), blocks_[b % kBlocks]);
      }
      if (b >= 1 && b - 1 < count && !read_places(blocks_[(b - 1) % kBlocks])) return;
      if (b >= 2) use_slots(blocks_[(b - 2) % kBlocks]);
    }
  }

 private:
  void find_recent(int64_t begin, int64_t end, Block& block) {
    int64_t left = 0;
    int64_t rows = end - begin;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t handle = handles_[i];
      if (handle < 0) {
        out_[i] = handle;
        --rows;
        continue;
      }
      const RecentSlots::Entry& entry = recent_.at(handle);
      out_[i] = entry.slot;
      block.position[left] = i;
      left += static_cast<int64_t>(entry.handle != handle);
    }
    block.left = left;
    outcome_->hits += rows - left;
    for (int64_t k = 0; k < left; ++k) {
      __builtin_prefetch(cache_.places + handle_row(handles_[block.position[k]]));
    }
  }

  // Returns false for an invalid place.
  bool read_places(Block& block) {
    const auto used = static_cast<int32_t>(cache_.clock[kTierUsed]);
    for (int64_t k = 0; k < block.left; ++k) {
      const int64_t i = block.position[k];
      const int32_t place =
          __atomic_load_n(cache_.places + handle_row(handles_[i]), __ATOMIC_RELAXED);
      if ((place < 0 && place != kSavedPlace) || place > used) {
        outcome_->bad = i;
        return false;
      }
      block.place[k] = place;
      if (place > 0) __builtin_prefetch(slot_at(cache_, place - 1), 1);
    }
    return true;
  }

  void use_slots(const Block& block) {
    for (int64_t k = 0; k < block.left; ++k) {
      const int64_t i = block.position[k];
      const int64_t slot = block.place[k] - 1;
      int64_t* words = slot_at(cache_, slot);
      if (slot < 0 || words[kSlotOwner] != handles_[i] + 1) {
        outcome_->missing.push_back(static_cast<int32_t>(i));
        continue;
      }
      ++outcome_->hits;
      outcome_->touches += static_cast<int64_t>(touch_slot(call_, words, threads_));
      const int64_t marks = __atomic_load_n(words + kSlotMarks, __ATOMIC_RELAXED);
      if (waits_) {
        const int64_t job = unfinished_job(slot_job(marks), call_.jobs->done, call_.jobs->next - 1);
        outcome_->wait_for = std::max(outcome_->wait_for, job);
      }
      out_[i] = make_handle(slot, slot_generation(marks));
      recent_.at(handles_[i]) = {handles_[i], out_[i]};
    }
  }

  const StageCall& call_;
  const CacheSlab& cache_;
  const int64_t* handles_;
  Threads threads_;
  RecentSlots& recent_;
  int64_t* out_;
  TileOutcome* outcome_;
  bool waits_;  // whether jobs are unfinished
  Block blocks_[kBlocks];
};

}  // namespace

bool touch(const StageCall& call, int64_t* slot, Threads threads) {
  return touch_slot(call, slot, threads);
}

void RecentSlots::begin(const CacheSlab& cache) {
  if (places_ == cache.places) return;
  places_ = cache.places;
  for (size_t i = 0; i < kEntries; ++i) entries_[i].handle = kNoHandle;
}

void find_slots(const StageCall& call, const Tile& tile, Threads threads, RecentSlots& recent,
                int64_t* out, TileOutcome* outcome) {
  const CacheSlab& cache =
      call.tiers->slabs[static_cast<size_t>(call.slab_of[static_cast<size_t>(tile.table)])];
  if (cache.places == nullptr) {
    std::copy(call.handles + tile.begin, call.handles + tile.end, out + tile.begin);
    return;
  }
  recent.begin(cache);
  TileSearch(call, cache, threads, recent, out, outcome).run(tile);
}

}  // namespace dynemb::cpu
