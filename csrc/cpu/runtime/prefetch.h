// Prefetching into the second-level cache. A fetch into the first level occupies one of its few
// buffers until the line arrives, and three rows fill them; the second level allows several times
// as many.
#pragma once

#include <cstdint>

#include "cpu/runtime/simd.h"

namespace dynemb::cpu {

DYNEMB_INLINE void prefetch_line_of(const void* address) { __builtin_prefetch(address, 0, 2); }

// The first 512 bytes of a row: the processor prefetches the rest itself.
DYNEMB_INLINE void prefetch_row_bytes(const char* row, int64_t bytes) {
  const int64_t prefetched = bytes < 512 ? bytes : 512;
  for (int64_t byte = 0; byte < prefetched; byte += 64) prefetch_line_of(row + byte);
  // rows of partial cache lines may end in one more
  if (prefetched % 64 != 0) prefetch_line_of(row + prefetched - 1);
}

}  // namespace dynemb::cpu
