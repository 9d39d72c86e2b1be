// Rows of live tables, which threads read while another one updates them.
//
// A row has the id of its owner and a generation, so that a reader can check that a copy belongs to
// its id and is one whole version:
//
//   int64 id | int64 generation | values | zeros up to 16 bytes
//
// Values of 8 bits and less are a row of core/rows/quantized.h, as in frozen tables: codes, then
// scale and bias.
//
// An even generation marks a whole row, an odd one a row that is being written or has no owner. A
// handle (core/index/handle.h) names a row and the generation of the id's ownership. In a row
// without an owner, the id field is the next free row.
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

// The next generation, with as many bits as in handles: from a whole row to a row without an owner,
// and so on.
DYNEMB_HD int64_t next_live_generation(int64_t generation) {
  return (generation + 1) & kGenerationMask;
}

}  // namespace dynemb
