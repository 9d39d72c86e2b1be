// Rows of live tables from and to floats.
#pragma once

#include <cstring>

#include "core/serving/live_row.h"
#include "cpu/rows/quantized_rows.h"
#include "cpu/rows/storage.h"

namespace dynemb::cpu {

// Fills a row of live_row_words(format, dim) words but for its id and generation; false if the
// format cannot hold the values.
inline bool pack_live_row(Storage format, const float* values, int64_t dim, int64_t* row) {
  std::memset(row, 0, 8 * static_cast<size_t>(live_row_words(format, dim)));
  char* codes = reinterpret_cast<char*>(row + kLiveHeaderWords);
  if (!is_quantized(format)) {
    store_row(format, kToNearest, values, dim, codes);
    return true;
  }
  const RowScale scale = live_row_scale(format, range_of_row(values, dim));
  if (!is_finite(scale.scale)) return false;
  auto* bytes = reinterpret_cast<uint8_t*>(codes);
  for (int64_t c = 0; c < dim; ++c) {
    const uint32_t code = row_code(format, values[c], scale);
    if (format == Storage::kInt4) {
      bytes[c / 2] |= static_cast<uint8_t>(code << (c % 2 * 4));
    } else {
      bytes[c] = static_cast<uint8_t>(code);
    }
  }
  row[kLiveStateWord] = live_state(0, float16_nearest(scale.scale), float16_nearest(scale.bias));
  return true;
}

// The values of a row whose codes have been copied, with kLiveScaleBytes of room behind them: the
// codes themselves, or `values` (dim floats).
constexpr int64_t kLiveScaleBytes = 8;

DYNEMB_INLINE const float* decode_live_row(Storage format, int64_t state, int64_t dim, char* codes,
                                           float* values) {
  if (format == Storage::kFloat32) return reinterpret_cast<const float*>(codes);
  if (is_quantized(format)) {
    const RowScale scale{float16_to_float(live_scale(state)), float16_to_float(live_bias(state)),
                         0.0f};
    store_row_scale(format, scale, reinterpret_cast<uint8_t*>(codes) + code_bytes(format, dim));
    load_quantized_row(format, codes, dim, values);
  } else {
    load_row(format, codes, dim, values);
  }
  return values;
}

}  // namespace dynemb::cpu
