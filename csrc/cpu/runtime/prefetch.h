// Lines of memory that a loop will touch soon, fetched into the second cache. What is fetched into
// the first one occupies one of its few buffers until it has come, which are full after three rows;
// the second one waits for several times as many.
#pragma once

#include <cstdint>

#include "cpu/runtime/simd.h"

namespace dynemb::cpu {

DYNEMB_INLINE void prefetch_line_of(const void* address) { __builtin_prefetch(address, 0, 2); }

// The first 512 bytes of a row: the processor sees what follows by itself.
DYNEMB_INLINE void prefetch_row_bytes(const char* row, int64_t bytes) {
  const int64_t prefetched = bytes < 512 ? bytes : 512;
  for (int64_t byte = 0; byte < prefetched; byte += 64) prefetch_line_of(row + byte);
  // rows that are no whole cache lines may end in one more
  if (prefetched % 64 != 0) prefetch_line_of(row + prefetched - 1);
}

}  // namespace dynemb::cpu
