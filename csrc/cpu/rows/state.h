// The optimizer state of new rows.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/rows/slab_state.h"
#include "cpu/runtime/simd.h"

namespace dynemb::cpu {

// Writes the state of a row that was never updated. `initial` is for the first state with a value
// per weight; it must be 0 if that has 8-bit floats.
DYNEMB_INLINE void write_fresh_state(const SlabState& state, int64_t row, int64_t dim,
                                     float initial) {
  for (int k = 0; k < state.element_states; ++k) {
    char* values = state.element[k] + row * state.row_bytes[k];
    if (k > 0 || initial == 0.0f) {
      std::memset(values, 0, static_cast<size_t>(state.row_bytes[k]));
    } else if (state.storage[k] == Storage::kFloat32) {
      for (int64_t c = 0; c < dim; ++c) reinterpret_cast<float*>(values)[c] = initial;
    } else {
      const uint16_t stored = bfloat16_nearest(initial);
      for (int64_t c = 0; c < dim; ++c) reinterpret_cast<uint16_t*>(values)[c] = stored;
    }
  }
  for (int k = 0; k < state.row_states; ++k) {
    state.of_row[k][row] = k == 0 && state.element_states == 0 ? initial : 0.0f;
  }
  if (state.steps != nullptr) state.steps[row] = 0;
}

}  // namespace dynemb::cpu
