// Rows as they were when a save began that reads them while training goes on.
//
// A slab may have a vector of copy-on-write words (core/rows/copy_on_write.h). While it is
// active, whoever writes a row that the save has not read yet first copies the row, weights and
// state, to a place in that vector. The save copies rows without a lock and asks afterwards whether
// they had been preserved by then: if so, it takes the row from its place, which is then free for
// another row. Where no place is free, the writer waits until the save has read its row.
//
// Nobody writes rows while the words are made active, and the thread that reads never waits for
// training. Who makes them inactive, at the end or after a failure, ends all waiting.
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

// Before a row is written. `weights`: of the row; `weight_bytes`: how many they are.
void copy_before_write(const SlabState& state, int64_t row, const char* weights,
                       int64_t weight_bytes);

// Copies a row of one slab over that of another with the same tensors; then, where `state` has the
// row in a place, what is there. The row counts as read from then on.
void take_row(const SlabState& state, int64_t row, const char* weights, int64_t weight_bytes,
              const SlabState& to, int64_t to_row, char* to_weights);

}  // namespace dynemb::cpu
