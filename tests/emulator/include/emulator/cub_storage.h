#pragma once

#include <cstddef>
#include <cstring>

#include "emulator/streams.h"

namespace emulator {

// The temporary storage of cub's functions: true if the call only asks how much.
inline bool only_asks(const void* storage, size_t& storage_bytes, size_t needed,
                      cudaError_t* status) {
  *status = cudaSuccess;
  if (storage == nullptr) {
    storage_bytes = needed;
    return true;
  }
  if (storage_bytes < needed) *status = cudaErrorInvalidValue;
  return false;
}
// Temporary storage is overwritten, so that a caller notices if it still holds something.
inline void overwrite(void* storage, size_t needed) { std::memset(storage, 0xA5, needed); }

}  // namespace emulator
