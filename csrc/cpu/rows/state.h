// The optimizer state of the rows of a slab.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "cpu/rows/view.h"

namespace dynemb::cpu {

constexpr int kMaxStates = 3;

struct SlabState {
  int element_states = 0;          // a value per weight
  char* element[kMaxStates] = {};  // [rows, ...]
  Storage storage[kMaxStates] = {};
  int64_t row_bytes[kMaxStates] = {};
  int row_states = 0;              // a float per row
  float* of_row[kMaxStates] = {};  // [rows]
  int32_t* steps = nullptr;        // [rows], or none
};

// `state`: tensor k of slab s at k * slabs + s. Those of two dimensions hold a value per weight,
// or, as uint8, a row of 8-bit floats (core/rows/storage.h); float32 [rows] a value per row; int32
// [rows] steps.
std::vector<SlabState> slab_state(const char* op, const std::vector<Tensor>& weights,
                                  const std::vector<Tensor>& state);

// The state of a row that was never updated. `initial` is for the first tensor of values, which is
// not of 8-bit floats unless it is 0.
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
