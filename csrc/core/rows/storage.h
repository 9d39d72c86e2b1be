// Storage of values: rows as float32, bfloat16 or float16; optimizer state as float32, bfloat16 or
// 8-bit floats with a scale per block. Arithmetic is always float32.
//
// Rounding is to nearest even, or stochastic: up with the probability of the remainder, so that
// many small updates are not lost. Random bits are a function of (seed, id, step, tensor, column).
#pragma once

#include "core/index/hash.h"
#include "core/rows/float_bits.h"

namespace dynemb {

enum class Storage : int {
  kFloat32 = 0,
  kBFloat16 = 1,
  kFloat16 = 2,
  kBlockFloat8 = 3,  // of optimizer state
  // of read-only rows (core/rows/quantized.h)
  kInt8 = 4,
  kInt4 = 5,
  kFloat8 = 6
};

// -- bfloat16 ------------------------------------------------------------------------------------

DYNEMB_HD float bfloat16_to_float(uint16_t value) {
  return float_from_bits(static_cast<uint32_t>(value) << 16);
}
// Values: float, or several floats; Words: their bits. The upper half is the result. NaN becomes
// 0x7fc0, as in torch.
template <class Values, class Words>
DYNEMB_HD Words bfloat16_nearest_bits(Values values, Words bits) {
  const Words rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return values != values ? Words{} + 0x7fc00000u : rounded;
}
// `words`: the upper halves are random.
template <class Values, class Words>
DYNEMB_HD Words bfloat16_stochastic_bits(Values values, Words bits, Words words) {
  const Words rounded = bits + (words >> 16);  // infinity stays: its lower half is 0
  return values != values ? Words{} + 0x7fc00000u : rounded;
}
DYNEMB_HD uint16_t bfloat16_nearest(float value) {
  return static_cast<uint16_t>(bfloat16_nearest_bits(value, float_bits(value)) >> 16);
}
DYNEMB_HD uint16_t bfloat16_stochastic(float value, uint32_t word) {
  return static_cast<uint16_t>(bfloat16_stochastic_bits(value, float_bits(value), word) >> 16);
}

// -- float16 -------------------------------------------------------------------------------------
// Does not use the processor's conversions, which some instruction sets lack, nor float32
// subnormals, which torch.set_flush_denormal would turn into zeros. A NaN becomes a quiet one, as
// in the processor's conversion to float32, which cpu/rows/floats.h uses if there is one.

// Values: float, or several floats; Words: their bits.

// Whole numbers below 2^23 and back: the last bits of 2^23 + number are the number.
template <class Values, class Words>
DYNEMB_HD Values whole_to_float(Words number) {
  return bits_as<Values>(number | 0x4b000000u) - 8388608.0f;
}
template <class Words, class Values>
DYNEMB_HD Words float_to_whole(Values number) {
  const Values nearest = (number + 8388608.0f) - 8388608.0f;
  const Values below = nearest > number ? nearest - 1.0f : nearest;
  return bits_as<Words>(below + 8388608.0f) & 0x7fffffu;
}

template <class Values, class Words>
DYNEMB_HD Words float16_to_float_bits(Words value) {
  const Words sign = (value & 0x8000u) << 16;
  const Words magnitude = value & 0x7fffu;
  const Values subnormal = whole_to_float<Values>(magnitude) * 5.9604644775390625e-8f;  // 2^-24
  const Words normal = (magnitude << 13) + (112u << 23);
  const Words nan = (magnitude << 13) | 0x7fc00000u;
  const Words special = magnitude > 0x7c00u ? nan : Words{} + 0x7f800000u;
  const Words finite = magnitude < 0x0400u ? bits_as<Words>(subnormal) : normal;
  return sign | (magnitude < 0x7c00u ? finite : special);
}
DYNEMB_HD float float16_to_float(uint16_t value) {
  return float_from_bits(float16_to_float_bits<float>(static_cast<uint32_t>(value)));
}

// The magnitude in units of 2^-24, below 2^-14, the least normal number; otherwise 0.
template <class Values, class Words>
DYNEMB_HD Values float16_units(Words magnitude) {
  return bits_as<Values>(magnitude < 0x38800000u ? magnitude : Words{}) * 16777216.0f;
}
// `halfway`: added below the last of 13 bits that are kept.
template <class Values, class Words>
DYNEMB_HD Words float16_rounded(Words bits, Words halfway, Values subnormal_part) {
  const Words sign = (bits >> 16) & 0x8000u;
  const Words magnitude = bits & 0x7fffffffu;
  const Words normal = (magnitude + halfway - (112u << 23)) >> 13;
  const Words finite = normal > 0x7c00u ? Words{} + 0x7c00u : normal;
  const Words subnormal = float_to_whole<Words>(float16_units<Values>(magnitude) + subnormal_part);
  const Words small = magnitude < 0x38800000u ? subnormal : finite;
  const Words special = magnitude > 0x7f800000u ? Words{} + 0x7e00u : Words{} + 0x7c00u;  // NaN
  return sign | (magnitude >= 0x47800000u ? special : small);
}
template <class Values, class Words>
DYNEMB_HD Words float16_nearest_bits(Words bits) {
  const Values units = float16_units<Values>(bits & 0x7fffffffu);
  // units are below 1024: adding and subtracting 2^23 rounds to nearest even
  const Values rounded = (units + 8388608.0f) - 8388608.0f;
  return float16_rounded<Values, Words>(bits, ((bits >> 13) & 1u) + 0xfffu, rounded - units);
}
// `words`: the upper halves are random.
template <class Values, class Words>
DYNEMB_HD Words float16_stochastic_bits(Words bits, Words words) {
  const Words part = words >> 19;
  return float16_rounded<Values, Words>(bits, part, whole_to_float<Values>(part) * 1.220703125e-4f);
}
DYNEMB_HD uint16_t float16_nearest(float value) {
  return static_cast<uint16_t>(float16_nearest_bits<float>(float_bits(value)));
}
DYNEMB_HD uint16_t float16_stochastic(float value, uint32_t word) {
  return static_cast<uint16_t>(float16_stochastic_bits<float>(float_bits(value), word));
}

// -- random bits for rounding --------------------------------------------------------------------

// Key of the random bits of one row and tensor at one step. `tensor`: 0 for weights, 1 + k for
// state k.
DYNEMB_HD uint64_t rounding_key(int64_t seed, int64_t id, int64_t step, int tensor) {
  const uint64_t of_table = fmix64(static_cast<uint64_t>(seed) ^ 0x3c6ef372fe94f82bULL);
  const uint64_t of_step = 8 * static_cast<uint64_t>(step) + static_cast<uint64_t>(tensor);
  return fmix64((of_table ^ static_cast<uint64_t>(id) * 0x9e3779b97f4a7c15ULL) +
                of_step * 0xd1b54a32d192ed03ULL);
}
// Random bits for columns 16 * b + j and 16 * b + 8 + j, j < 8, as one word: a multiply-xorshift
// hash of a Weyl sequence with a random key, as cheap as vectors allow. Tests bound its bias and
// correlations. `index`: 8 * b + j.
template <class Words>
DYNEMB_HD Words rounding_words(uint64_t key, Words index) {
  Words x = static_cast<uint32_t>(key) + index * 0x9e3779b9u;
  x ^= x >> 16;
  x *= 0x21f0aaadu;
  return x ^ (x >> 15) ^ static_cast<uint32_t>(key >> 32);
}
// At least the upper 16 bits are random.
DYNEMB_HD uint32_t rounding_word(uint64_t key, uint32_t column) {
  const uint32_t words = rounding_words<uint32_t>(key, column / 16 * 8 + column % 8);
  return column % 16 < 8 ? words : words << 16;
}

// -- 8-bit floats in blocks ----------------------------------------------------------------------
// A row of state is `dim` codes, then a float32 scale for every kBlockColumns columns, 4-byte
// aligned. The largest value of a block has the code of 1.875 times the scale.
//
// Signed codes: sign, 4 bits of exponent, 3 of mantissa. Unsigned: 5 and 3. Code 0 is zero.
// Rounding is stochastic: a moving average moves by less than half a code a step, which rounding to
// nearest would lose. A positive unsigned value never becomes zero, because Adam divides by its
// root.

constexpr int64_t kBlockColumns = 128;

DYNEMB_HD int64_t block_codes_bytes(int64_t dim) { return (dim + 3) / 4 * 4; }
DYNEMB_HD int64_t block_row_bytes(int64_t dim) {
  return block_codes_bytes(dim) + 4 * ((dim + kBlockColumns - 1) / kBlockColumns);
}
// `largest`: greatest magnitude in the block, finite.
DYNEMB_HD float block_scale(float largest) { return largest * (1.0f / 1.875f); }
DYNEMB_HD float block_inverse(float scale) { return scale > 1e-37f ? 1.0f / scale : 0.0f; }

constexpr uint32_t kUnsignedCodeBase = (127u - 31u) << 3;
constexpr uint32_t kSignedCodeBase = (127u - 15u) << 3;

DYNEMB_HD float unsigned_code_value(uint8_t code, float scale) {
  const float value = float_from_bits((kUnsignedCodeBase + code) << 20);
  return code == 0 ? 0.0f : value * scale;
}
DYNEMB_HD float signed_code_value(uint8_t code, float scale) {
  const uint32_t magnitude = code & 0x7fu;
  const float value = float_from_bits((kSignedCodeBase + magnitude) << 20);
  const float scaled = magnitude == 0 ? 0.0f : value * scale;
  return (code & 0x80u) != 0 ? -scaled : scaled;
}
DYNEMB_HD uint32_t code_magnitude(float value, float inverse, uint32_t base, uint32_t most,
                                  uint32_t word) {
  const uint32_t bits = float_bits(value * inverse) & 0x7fffffffu;
  const int32_t code =
      static_cast<int32_t>((bits + (word >> 12)) >> 20) - static_cast<int32_t>(base);
  const int32_t capped = code > static_cast<int32_t>(most) ? static_cast<int32_t>(most) : code;
  return static_cast<uint32_t>(capped < 0 ? 0 : capped);
}
DYNEMB_HD uint8_t unsigned_code(float value, float inverse, uint32_t word) {
  const uint32_t code = code_magnitude(value, inverse, kUnsignedCodeBase, 255, word);
  return static_cast<uint8_t>(code == 0 && value > 0.0f ? 1u : code);
}
DYNEMB_HD uint8_t signed_code(float value, float inverse, uint32_t word) {
  const uint32_t code = code_magnitude(value, inverse, kSignedCodeBase, 127, word);
  return static_cast<uint8_t>(code | ((float_bits(value) >> 24) & 0x80u));
}

}  // namespace dynemb
