// Rows of live tables: tables that threads read while another one updates them.
//
// A row says whose it is and whether it is whole, so that a reader can tell whether what it has
// copied belongs to its id and is one version of it:
//
//   int64 id | uint32 generation | float16 scale | float16 bias | codes | zeros up to 16 bytes
//
// An even generation is that of a whole row, an odd one that of a row which is being written or has
// no owner. A handle (core/index/handle.h) names a row and the generation with which it is the
// id's. The id of a row without an owner is the next such row. Scale and bias are of formats of 8
// bits and less.
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
constexpr int kLiveStateWord = 1;  // generation, scale and bias, which change together
constexpr int kLiveHeaderWords = 2;

DYNEMB_HD int64_t live_code_bits(Storage format) {
  if (format == Storage::kInt4) return 4;
  if (is_quantized(format)) return 8;
  return format == Storage::kFloat32 ? 32 : 16;
}

// 8-byte words of the codes of a row: an even number, so that rows are aligned to 16 bytes.
DYNEMB_HD int64_t live_code_words(Storage format, int64_t dim) {
  return (dim * live_code_bits(format) + 127) / 128 * 2;
}
DYNEMB_HD int64_t live_row_words(Storage format, int64_t dim) {
  return kLiveHeaderWords + live_code_words(format, dim);
}

// Generations have as many bits as those of handles.
DYNEMB_HD int64_t live_state(int64_t generation, uint16_t scale, uint16_t bias) {
  const uint64_t halves = static_cast<uint64_t>(bias) << 16 | scale;
  return static_cast<int64_t>(halves << 32 | static_cast<uint64_t>(generation));
}
DYNEMB_HD int64_t live_generation(int64_t state) { return state & 0xffffffff; }
DYNEMB_HD uint16_t live_scale(int64_t state) {
  return static_cast<uint16_t>(static_cast<uint64_t>(state) >> 32);
}
DYNEMB_HD uint16_t live_bias(int64_t state) {
  return static_cast<uint16_t>(static_cast<uint64_t>(state) >> 48);
}

// The scale of a row of 8 or 4 bits, as floats of 16 bits hold it: codes are made with what is
// stored. NaN where they cannot: of rows with NaN, infinity or values beyond about 65504.
DYNEMB_HD RowScale live_row_scale(Storage format, const RowRange& range) {
  if (range.most >= kOrderOfInfinity || range.least <= ~kOrderOfInfinity) return scale_of_nothing();
  const float least = float_of_order(range.least) + 0.0f;  // 0 for -0
  const float most = float_of_order(range.most) + 0.0f;
  const bool affine = format != Storage::kFloat8;
  const float largest = -least > most ? -least : most;
  const float bias = affine ? float16_to_float(float16_nearest(least)) : 0.0f;
  const float span = affine ? most - bias : largest;
  const float steps = format == Storage::kInt4 ? 15.0f : affine ? 255.0f : 448.0f;
  float scale = float16_to_float(float16_nearest(span / steps));
  if (!is_finite(bias) || !is_finite(scale)) return scale_of_nothing();
  if (!(scale > 0.0f)) scale = 5.9604644775390625e-8f;  // 2^-24, the least float of 16 bits
  return {scale, bias, 1.0f / scale};
}

// What follows a generation: of a whole row that of the row without an owner, and so on.
DYNEMB_HD int64_t next_live_generation(int64_t generation) {
  return (generation + 1) & kGenerationMask;
}

}  // namespace dynemb
