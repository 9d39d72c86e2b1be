// Rows of live tables: tables that threads read while another one updates them.
//
// A row says whose it is and whether it is whole, so that a reader can tell whether what it has
// copied belongs to its id and is one version of it:
//
//   int64 id | int64 generation | values | zeros up to 16 bytes
//
// Values of 8 bits and less are a row of core/rows/quantized.h, as frozen tables have it: codes,
// then scale and bias.
//
// An even generation is that of a whole row, an odd one that of a row which is being written or has
// no owner. A handle (core/index/handle.h) names a row and the generation with which it is the
// id's. The id of a row without an owner is the next such row.
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

constexpr int kLiveIdWord = 0;
constexpr int kLiveGenerationWord = 1;
constexpr int kLiveHeaderWords = 2;

// Bytes of the values of a row.
DYNEMB_HD int64_t live_value_bytes(Storage format, int64_t dim) {
  if (is_quantized(format)) return code_bytes(format, dim) + scale_bytes(format);
  return dim * (format == Storage::kFloat32 ? 4 : 2);
}

// 8-byte words of the values of a row: an even number, so that rows are aligned to 16 bytes.
DYNEMB_HD int64_t live_value_words(Storage format, int64_t dim) {
  return (live_value_bytes(format, dim) + 15) / 16 * 2;
}
DYNEMB_HD int64_t live_row_words(Storage format, int64_t dim) {
  return kLiveHeaderWords + live_value_words(format, dim);
}

// What follows a generation, which has as many bits as those of handles: of a whole row that of the
// row without an owner, and so on.
DYNEMB_HD int64_t next_live_generation(int64_t generation) {
  return (generation + 1) & kGenerationMask;
}

}  // namespace dynemb
