// Rows of 8 or 4 bits a value, with a scale for each row, for read-only tables. The layouts and
// bytes of int8 and int4 are those of FBGEMM's fused rows (github.com/pytorch/FBGEMM, ops
// FloatToFused8BitRowwiseQuantized and FloatToFusedNBitRowwiseQuantizedSBHalf):
//
//   int8: a byte for each column, then scale and bias as float32; value = scale * code + bias
//   int4: half a byte for each column, the first of two columns in the lower half, then scale and
//         bias as float16; value as above; an even number of columns
//   fp8:  a float of 4 bits of exponent and 3 of mantissa for each column (OCP E4M3, torch's
//         float8_e4m3fn), then a scale as float32; value = scale * code
//
// Rows follow each other without padding, so a scale may be unaligned. A row with NaN or infinity
// has NaN as its scale and reads as NaN in all columns. So does a row with a range beyond the
// scales of the format.
#pragma once

#include "core/features/bytes.h"
#include "core/rows/storage.h"

namespace dynemb {

// Formats as ops take them; Python's RowFormat has the same numbers.
enum RowFormat : int64_t {
  kRowsOfFloats = 0,  // not quantized: of the dtype of their tensor
  kRowsOfInt8 = 1,
  kRowsOfInt4 = 2,
  kRowsOfFloat8 = 3
};

DYNEMB_HD Storage storage_of_format(int64_t format) {
  return format == kRowsOfInt8   ? Storage::kInt8
         : format == kRowsOfInt4 ? Storage::kInt4
                                 : Storage::kFloat8;
}
DYNEMB_HD bool is_quantized(Storage storage) { return storage >= Storage::kInt8; }

// Bytes of the codes of a row, without the scale.
DYNEMB_HD int64_t code_bytes(Storage storage, int64_t dim) {
  return storage == Storage::kInt4 ? dim / 2 : dim;
}
DYNEMB_HD int64_t scale_bytes(Storage storage) { return storage == Storage::kInt8 ? 8 : 4; }
// Columns of a row of so many bytes; less than 1: invalid.
DYNEMB_HD int64_t quantized_dim(Storage storage, int64_t row_bytes) {
  return (row_bytes - scale_bytes(storage)) * (storage == Storage::kInt4 ? 2 : 1);
}

// -- the range of a row --------------------------------------------------------------------------

// Floats as integers of the same order; -0 is below 0, and NaN beyond infinity on its side.
DYNEMB_HD int32_t float_order(float value) {
  const uint32_t bits = float_bits(value);
  const uint32_t magnitude = bits & 0x7fffffffu;
  return static_cast<int32_t>((bits >> 31) != 0 ? ~magnitude : magnitude);
}
DYNEMB_HD float float_of_order(int32_t order) {
  const auto bits = static_cast<uint32_t>(order);
  return float_from_bits((bits >> 31) != 0 ? ~bits | 0x80000000u : bits);
}
constexpr int32_t kOrderOfInfinity = 0x7f800000;

// The least and the largest value of a row, as orders.
struct RowRange {
  int32_t least = INT32_MAX;
  int32_t most = INT32_MIN;
};

// -- scales --------------------------------------------------------------------------------------

// Scale and bias as stored, and the factor that codes are made with.
struct RowScale {
  float scale;
  float bias;
  float inverse;
};

DYNEMB_HD RowScale scale_of_nothing() {
  return {float_from_bits(0x7fc00000u), float_from_bits(0x7fc00000u), 0.0f};
}
DYNEMB_HD bool is_finite(float value) { return (float_bits(value) & 0x7f800000u) != 0x7f800000u; }

DYNEMB_HD RowScale int8_scale(float least, float most) {
  const float range = most - least;
  if (!is_finite(range)) return scale_of_nothing();
  return {range / 255.0f, least, 255.0f / (range + 1e-8f)};
}
// Scale and bias are floats of 16 bits, and codes are computed from the rounded ones.
DYNEMB_HD RowScale int4_scale(float least, float most) {
  const float bias = float16_to_float(float16_nearest(least));
  const float range = most - bias;
  const float exact = range == 0.0f ? 1.0f : range / 15.0f;
  float scale = float16_to_float(float16_nearest(exact));
  if (!is_finite(bias) || !is_finite(scale)) return scale_of_nothing();
  if (scale == 0.0f) scale = 1.0f;
  return {scale, bias, 1.0f / scale};
}
// Codes reach up to 448. The least scale keeps values of rows near 0 from subnormal floats, which
// torch.set_flush_denormal would turn into zeros.
DYNEMB_HD RowScale float8_scale(float least, float most) {
  const float largest = -least > most ? -least : most;
  const float exact = largest / 448.0f;
  const float scale = exact < 7.8886090522101180541e-31f ? 7.8886090522101180541e-31f : exact;
  return {scale, 0.0f, 1.0f / scale};  // at least 2^-100
}

DYNEMB_HD RowScale row_scale(Storage storage, const RowRange& range) {
  const bool finite = range.most < kOrderOfInfinity && range.least > ~kOrderOfInfinity;
  if (!finite) return scale_of_nothing();
  const float least = float_of_order(range.least) + 0.0f;  // 0 for -0
  const float most = float_of_order(range.most) + 0.0f;
  if (storage == Storage::kInt8) return int8_scale(least, most);
  if (storage == Storage::kInt4) return int4_scale(least, most);
  return float8_scale(least, most);
}

// -- codes ---------------------------------------------------------------------------------------

// Rounds to nearest even, for values from 0 to 2^22; the result is in the lower bits of a word.
DYNEMB_HD uint32_t rounded_bits(float value) { return float_bits(value + 8388608.0f); }

DYNEMB_HD uint32_t affine_code(float value, const RowScale& scale, uint32_t largest) {
  const float steps = (value - scale.bias) * scale.inverse;
  const float least = steps > 0.0f ? steps : 0.0f;
  const float capped = least < static_cast<float>(largest) ? least : static_cast<float>(largest);
  return rounded_bits(capped) & 0xffu;
}
DYNEMB_HD uint32_t int8_code(float value, const RowScale& scale) {
  return affine_code(value, scale, 255);
}
DYNEMB_HD uint32_t int4_code(float value, const RowScale& scale) {
  return affine_code(value, scale, 15);
}
constexpr uint32_t kFloat8Base = 120u << 3;  // exponents of float32 and E4M3 differ by 120
constexpr uint32_t kFloat8Largest = 0x7e;    // 448

DYNEMB_HD uint32_t float8_code(float value, const RowScale& scale) {
  const float scaled = value * scale.inverse;
  const uint32_t bits = float_bits(scaled);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t normal = ((magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20) - kFloat8Base;
  // below 2^-6: units of 2^-9, of which 8 are the least normal number
  const bool small = magnitude < 0x3c800000u;
  const uint32_t units = rounded_bits((small ? float_from_bits(magnitude) : 0.0f) * 512.0f) & 0xfu;
  const uint32_t code = small ? units : normal;
  return ((bits >> 24) & 0x80u) | (code < kFloat8Largest ? code : kFloat8Largest);
}

DYNEMB_HD float affine_value(uint32_t code, float scale, float bias) {
  return scale * static_cast<float>(static_cast<int32_t>(code)) + bias;
}
// No branches and no subnormal floats, so that loops are vectorized: below 2^-6, exponent and
// leading bit of 2^-6 are added and subtracted again.
DYNEMB_HD float float8_value(uint32_t code) {
  const uint32_t magnitude = code & 0x7fu;
  const uint32_t small = 0u - static_cast<uint32_t>(magnitude < 8u);
  const uint32_t nan = 0u - static_cast<uint32_t>(magnitude == 0x7fu);
  const uint32_t bits = (magnitude << 20) + (kFloat8Base << 20) + (small & 0x00800000u);
  const float value = float_from_bits(bits) - float_from_bits(small & 0x3c800000u);
  return float_from_bits(float_bits(value) | (nan & 0x7fc00000u) | (code & 0x80u) << 24);
}

// -- what follows the codes ----------------------------------------------------------------------

DYNEMB_HD uint16_t load_half(const uint8_t* from) {
  return static_cast<uint16_t>(from[0] | from[1] << 8);
}
DYNEMB_HD void store_bytes(uint8_t* to, uint32_t word, int count) {
  for (int i = 0; i < count; ++i) to[i] = static_cast<uint8_t>(word >> (8 * i));
}
// `from`, `to`: behind the codes of a row.
DYNEMB_HD RowScale load_row_scale(Storage storage, const uint8_t* from) {
  if (storage == Storage::kInt4) {
    return {float16_to_float(load_half(from)), float16_to_float(load_half(from + 2)), 0.0f};
  }
  const float scale = float_from_bits(static_cast<uint32_t>(load32(from)));
  if (storage == Storage::kFloat8) return {scale, 0.0f, 0.0f};
  return {scale, float_from_bits(static_cast<uint32_t>(load32(from + 4))), 0.0f};
}
DYNEMB_HD void store_row_scale(Storage storage, const RowScale& scale, uint8_t* to) {
  if (storage == Storage::kInt4) {
    store_bytes(to, float16_nearest(scale.scale), 2);
    store_bytes(to + 2, float16_nearest(scale.bias), 2);
    return;
  }
  store_bytes(to, float_bits(scale.scale), 4);
  if (storage == Storage::kInt8) store_bytes(to + 4, float_bits(scale.bias), 4);
}

// A column of a row with codes at `codes`.
DYNEMB_HD float quantized_value(Storage storage, const uint8_t* codes, int64_t column,
                                const RowScale& row) {
  if (storage == Storage::kFloat8) return row.scale * float8_value(codes[column]);
  const uint32_t code =
      storage == Storage::kInt8 ? codes[column] : (codes[column / 2] >> (column % 2 * 4)) & 15u;
  return affine_value(code, row.scale, row.bias);
}

}  // namespace dynemb
