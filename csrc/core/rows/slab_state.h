// The optimizer state of the rows of a slab.
#pragma once

#include <cstdint>

#include "core/rows/storage.h"

namespace dynemb {

constexpr int kMaxStates = 3;

struct SlabState {
  int element_states;         // a value per weight
  char* element[kMaxStates];  // [rows, ...]
  Storage storage[kMaxStates];
  int64_t row_bytes[kMaxStates];
  int row_states;             // a float per row
  float* of_row[kMaxStates];  // [rows]
  int32_t* steps;             // [rows], or none
};

}  // namespace dynemb
