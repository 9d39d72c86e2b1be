// Rows of live tables, which threads read while another one updates them.
//
// A row has the values of its id, and zeros up to 16 bytes. Values of 8 bits and less are a row of
// core/rows/quantized.h, as in frozen tables: codes, then scale and bias. A row without an owner
// has the number of the next free row, plus 1, and the generation of its last owner.
//
// A handle (core/index/handle.h) names a row and the generation of the id's ownership. Generations
// are even.
#pragma once

#include "core/index/handle.h"
#include "core/rows/quantized.h"

namespace dynemb {

// Formats are numbers of Storage.
constexpr int64_t kLiveFormats[] = {
    static_cast<int64_t>(Storage::kFloat32), static_cast<int64_t>(Storage::kBFloat16),
    static_cast<int64_t>(Storage::kFloat16), static_cast<int64_t>(Storage::kInt8),
    static_cast<int64_t>(Storage::kInt4),    static_cast<int64_t>(Storage::kFloat8),
};
DYNEMB_HD bool is_live_format(int64_t format) {
  for (const int64_t known : kLiveFormats) {
    if (format == known) return true;
  }
  return false;
}

// Words of a row without an owner.
constexpr int kLiveNextFreeWord = 0;
constexpr int kLiveGenerationWord = 1;

// Bytes of the values of a row.
DYNEMB_HD int64_t live_value_bytes(Storage format, int64_t dim) {
  if (is_quantized(format)) return code_bytes(format, dim) + scale_bytes(format);
  return dim * (format == Storage::kFloat32 ? 4 : 2);
}

// 8-byte words of a row: an even number, so that rows are aligned to 16 bytes.
DYNEMB_HD int64_t live_row_words(Storage format, int64_t dim) {
  return (live_value_bytes(format, dim) + 15) / 16 * 2;
}

// The generation of the next owner of a row.
DYNEMB_HD int64_t next_live_generation(int64_t generation) {
  return (generation + 2) & kGenerationMask;
}

}  // namespace dynemb
