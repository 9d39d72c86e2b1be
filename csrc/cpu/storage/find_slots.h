// First pass of a call over its ids: the handles of the slots of cached rows, and the ids that need
// a slot.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/index/handle.h"
#include "cpu/storage/cache.h"

namespace dynemb::cpu {

// Whether one thread or several look up the ids of a call. Several may use one row: the outcome is
// the same, but only one thread can do without locks.
enum class Threads { kOne, kSeveral };

// Marks a use of a slot's row. Returns whether this is the first use of the epoch.
bool touch(const StageCall& call, int64_t* slot, Threads threads);

// Slots of rows that a thread has found in this call. A batch repeats many of its ids, and these
// need neither their place nor their slot a second time.
class RecentSlots {
 public:
  struct Entry {
    int64_t handle;  // of a row
    int64_t slot;    // handle of its slot
  };
  RecentSlots() : entries_(std::make_unique<Entry[]>(kEntries)) {}
  // Starts with rows of another slab.
  void begin(const CacheSlab& cache);
  // Where the row is, if it has been found.
  Entry& at(int64_t handle) { return entries_[static_cast<size_t>(handle_row(handle)) % kEntries]; }

 private:
  static constexpr size_t kEntries = 8192;  // 128 KB: in a second-level cache

  const int32_t* places_ = nullptr;
  std::unique_ptr<Entry[]> entries_;
};

struct TileOutcome {
  std::vector<int32_t> missing;  // positions
  int64_t hits = 0;
  int64_t touches = 0;
  int64_t wait_for = 0;
  int64_t bad = -1;  // position of a row with an invalid place
};

// Writes the handles of slots to `out`; at missing positions, which get theirs later, it is
// undefined.
void find_slots(const StageCall& call, const Tile& tile, Threads threads, RecentSlots& recent,
                int64_t* out, TileOutcome* outcome);

}  // namespace dynemb::cpu
