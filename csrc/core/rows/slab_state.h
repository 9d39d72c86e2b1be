// The optimizer state of the rows of a slab.
#pragma once

#include <cstdint>

#include "core/rows/storage.h"

namespace dynemb {

constexpr int kMaxStates = 3;

// What `changes` of a row is after it has been written.
constexpr uint8_t kChangedForAll = 0xff;

struct SlabState {
  int element_states;         // a value per weight
  char* element[kMaxStates];  // [rows, ...]
  Storage storage[kMaxStates];
  int64_t row_bytes[kMaxStates];
  int row_states;             // a float per row
  float* of_row[kMaxStates];  // [rows]
  int32_t* steps;             // [rows], or none
  uint8_t* changes;           // [rows], or none: a bit for each that wants to know what changes
  int64_t* undo;              // or none: rows as they were when a save began (cpu/rows/undo.h)
  int64_t undo_words;
};

}  // namespace dynemb
