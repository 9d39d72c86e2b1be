// Handle of an id: a row number and the generation of its ownership.
//
// handle = row : 36 | generation : 28 in one int64. A free-list entry carries the next generation,
// so stale handles differ from the one of the row's new owner. A row is *live* if the generation
// stored beside it equals the handle's: only then do its weights belong to the id.
#pragma once

#include "core/host_device.h"

namespace dynemb {

constexpr int64_t kNoHandle = -1;       // the id has no row
constexpr int64_t kPaddingHandle = -2;  // the id is the table's padding id
constexpr int64_t kRefusedHandle = -3;  // the id was refused a row by training

constexpr int kGenerationBits = 28;
constexpr int64_t kGenerationMask = (int64_t{1} << kGenerationBits) - 1;
constexpr int64_t kFirstGeneration = 1;  // zero-filled memory holds generation 0: never written

DYNEMB_HD int64_t make_handle(int64_t row, int64_t generation) {
  // unsigned, because the row may be that of a damaged handle, which is negative
  const uint64_t high = static_cast<uint64_t>(row) << kGenerationBits;
  return static_cast<int64_t>(high) | (generation & kGenerationMask);
}
DYNEMB_HD int64_t handle_row(int64_t handle) { return handle >> kGenerationBits; }
DYNEMB_HD int32_t handle_generation(int64_t handle) {
  return static_cast<int32_t>(handle & kGenerationMask);
}

// Generation 0 is skipped: it means "never written".
DYNEMB_HD int64_t next_generation(int64_t generation) {
  const int64_t next = (generation + 1) & kGenerationMask;
  return next == 0 ? kFirstGeneration : next;
}

// The handle of a row's first owner. `generation` is kSlabGeneration of its slab.
DYNEMB_HD int64_t first_owner(int64_t row, int64_t generation) {
  return make_handle(row, next_generation(generation));
}

// The handle that the row's next owner gets.
DYNEMB_HD int64_t next_owner(int64_t handle) {
  return make_handle(handle_row(handle), next_generation(handle_generation(handle)));
}

enum class RowStatus { kLive, kUnwritten, kStale };

// kUnwritten: the stored generation is older than the handle's (the backward will write the row).
// kStale: it is newer; the row was given to another id. Compared with wrap-around.
DYNEMB_HD RowStatus row_status(int64_t handle, int32_t stored_generation) {
  const int32_t generation = handle_generation(handle);
  if (generation == stored_generation) return RowStatus::kLive;
  if (stored_generation == 0) return RowStatus::kUnwritten;
  const int64_t ahead = (static_cast<int64_t>(generation) - stored_generation) & kGenerationMask;
  return ahead < (int64_t{1} << (kGenerationBits - 1)) ? RowStatus::kUnwritten : RowStatus::kStale;
}

}  // namespace dynemb
