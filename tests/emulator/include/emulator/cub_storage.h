#pragma once

#include <cstddef>
#include <cstring>

#include "emulator/runtime_api.h"

namespace emulator {

// The temporary storage of cub's functions: true if the call only asks how much. What is given is
// overwritten, so that a caller notices if it still holds something.
inline bool only_asks(void* storage, size_t& storage_bytes, size_t needed, cudaError_t* status) {
  *status = cudaSuccess;
  if (storage == nullptr) {
    storage_bytes = needed;
    return true;
  }
  if (storage_bytes < needed) *status = cudaErrorInvalidValue;
  if (*status == cudaSuccess) std::memset(storage, 0xA5, needed);
  return false;
}

}  // namespace emulator
