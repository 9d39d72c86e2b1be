// Copy-on-write of rows for a save that reads them while training goes on.
//
// A slab may have a copy-on-write vector (core/rows/copy_on_write.h). While it is active, a writer
// first copies each row that the save has not read yet, weights and state, to a place in that
// vector. The save copies rows without a lock and checks the mark afterwards: if the row was copied
// by then, the save takes the copy, which frees the place. If no place is free, the writer waits
// until the save has read its row.
//
// Marks change by compare-and-swap from kCowUnread, of which one succeeds. If that of the save
// does, it releases the copied row, and no writer has begun: each acquires the mark first. If that
// of a writer does, the save finds it, whatever parts of later writes it has copied.
//
// No thread may write rows during activation. The reading thread never waits for training.
// Deactivation, at the end or after a failure, ends all waiting.
#pragma once

#include <cstdint>

#include "core/rows/copy_on_write.h"
#include "core/rows/slab_state.h"
#include "cpu/runtime/simd.h"

namespace dynemb::cpu {

DYNEMB_INLINE bool copies_on_write(const SlabState& state) {
  return state.copy_on_write != nullptr &&
         __atomic_load_n(state.copy_on_write + kCowActive, __ATOMIC_ACQUIRE) != 0;
}

// Called before a row is written. `weights`: of the row; `weight_bytes`: their size.
void copy_before_write(const SlabState& state, int64_t row, const char* weights,
                       int64_t weight_bytes);

// Copies a row of one slab over that of another with the same tensors; then, if `state` has a copy
// of the row, the copy. The row counts as read from then on.
void take_row(const SlabState& state, int64_t row, const char* weights, int64_t weight_bytes,
              const SlabState& to, int64_t to_row, char* to_weights);

}  // namespace dynemb::cpu
