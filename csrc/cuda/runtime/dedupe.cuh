// A table of small integers in scratch memory, with which the threads of a call find the first
// occurrence of every id: open addressing, a slot holds the least position of its id so far.
#pragma once

#include "cuda/runtime/device.cuh"
#include "cuda/runtime/launch.h"

namespace dynemb::cuda {

struct DedupeTable {
  int32_t* slots;  // -1: free
  int64_t mask;    // number of slots, a power of two, less 1

  // The slot of the id at `position`. is_same(other): whether the id at another position is equal.
  template <class Same>
  __device__ __forceinline__ int64_t insert(uint64_t hash, int64_t position,
                                            const Same& is_same) const {
    uint64_t slot = hash & static_cast<uint64_t>(mask);
    const int32_t mine = static_cast<int32_t>(position);
    for (;;) {
      // an older value is -1 or a later position: the atomic operations find out
      int32_t held = load_racing(slots + slot);
      if (held < 0) {
        held = atomicCAS(slots + slot, -1, mine);
        if (held < 0) return static_cast<int64_t>(slot);
      }
      if (is_same(held)) {
        if (mine < held) atomicMin(slots + slot, mine);
        return static_cast<int64_t>(slot);
      }
      slot = (slot + 1) & static_cast<uint64_t>(mask);
    }
  }

  __device__ __forceinline__ bool is_first(int64_t slot, int64_t position) const {
    return slots[slot] == position;
  }
};

inline int64_t dedupe_slots(int64_t ids) {
  int64_t slots = 64;
  while (slots < 2 * ids) slots *= 2;
  return slots;
}

// An empty table in the memory of so many slots.
inline DedupeTable empty_dedupe_table(const Call& call, int32_t* slots, int64_t count) {
  call.fill(slots, 0xff, count * 4);
  return {slots, count - 1};
}

}  // namespace dynemb::cuda
