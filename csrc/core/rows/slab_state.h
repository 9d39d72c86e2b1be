// The optimizer state of the rows of a slab.
#pragma once

#include <cstdint>

#include "core/rows/storage.h"

namespace dynemb {

constexpr int kMaxStates = 3;

// The dirty bits of a row after it has been written.
constexpr uint8_t kDirtyForAll = 0xff;

struct SlabState {
  int element_states;         // a value per weight
  char* element[kMaxStates];  // [rows, ...]
  Storage storage[kMaxStates];
  int64_t row_bytes[kMaxStates];
  int row_states;             // a float per row
  float* of_row[kMaxStates];  // [rows]
  int32_t* steps;             // [rows], or none
  uint8_t* dirty_bits;        // [rows], or none: a bit for each reader of changes
  int64_t* copy_on_write;     // or none: rows at the beginning of a save (cpu/rows/copy_on_write.h)
  int64_t copy_on_write_words;
};

}  // namespace dynemb
