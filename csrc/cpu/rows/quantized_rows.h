// Quantized rows from and to float32, vectorised over their columns (core/rows/quantized.h).
#pragma once

#include <cstring>

#include "core/rows/quantized.h"
#include "cpu/rows/floats.h"
#include "cpu/runtime/simd.h"

namespace dynemb::cpu {

// Eight columns of int4 as floats; int32 words, because some instruction sets cannot convert
// uint32.
DYNEMB_INLINE Floats8 half_bytes_to_floats(const uint8_t* codes) {
  typedef int32_t Integers8 __attribute__((vector_size(32)));
  const Words8 word = Words8{} + static_cast<uint32_t>(load32(codes));
  const Words8 code = (word >> Words8{0, 4, 8, 12, 16, 20, 24, 28}) & 15u;
  return __builtin_convertvector(reinterpret_cast<Integers8>(code), Floats8);
}

// Sixteen columns of fp8. A code is the upper half of its value as float32, except for the bias of
// the exponent, so vectors of 16 bits convert all of them at once. Codes of 0, below 2^-6, and of
// NaN are fixed up: few rows have them.
DYNEMB_INLINE void float8_to_floats(const uint8_t* codes, float scale, float* values) {
  typedef uint8_t Bytes16 __attribute__((vector_size(16)));
  typedef int8_t SignedBytes16 __attribute__((vector_size(16)));
  typedef int16_t SignedHalves16 __attribute__((vector_size(32)));
  Bytes16 code;
  std::memcpy(&code, codes, sizeof code);
  const Bytes16 other = reinterpret_cast<Bytes16>(((code + 1) & 0x7f) < 9);
  uint64_t others[2];
  std::memcpy(others, &other, sizeof others);
  if ((others[0] | others[1]) != 0) {
    for (int64_t c = 0; c < 16; ++c) values[c] = scale * float8_value(codes[c]);
    return;
  }
  const SignedHalves16 wide =
      __builtin_convertvector(reinterpret_cast<SignedBytes16>(code), SignedHalves16);
  const Halves16 sign_and_magnitude = reinterpret_cast<Halves16>(wide << 4) & 0x87f0;
  const Halves16 halves = sign_and_magnitude + static_cast<uint16_t>(kFloat8Base << 4);
  Floats8 first, second;
  bfloat16_to_floats(halves, &first, &second);
  store_floats(values, scale * first);
  store_floats(values + kFloats, scale * second);
}

DYNEMB_INLINE void load_quantized_row(Storage storage, const char* from, int64_t dim,
                                      float* __restrict values) {
  const auto* codes = reinterpret_cast<const uint8_t*>(from);
  const RowScale row = load_row_scale(storage, codes + code_bytes(storage, dim));
  int64_t c = 0;
  if (storage == Storage::kInt8) {
    constexpr int64_t kBlock = 16;  // a constant, so that narrow rows are vectorized
    for (; c + kBlock <= dim; c += kBlock) {
      for (int64_t j = c; j < c + kBlock; ++j) {
        values[j] = affine_value(codes[j], row.scale, row.bias);
      }
    }
  } else if (storage == Storage::kInt4) {
    for (; c + kFloats <= dim; c += kFloats) {
      store_floats(values + c, row.scale * half_bytes_to_floats(codes + c / 2) + row.bias);
    }
  } else {
    for (; c + 16 <= dim; c += 16) float8_to_floats(codes + c, row.scale, values + c);
    for (; c + kFloats <= dim; c += kFloats) {
      for (int64_t j = c; j < c + kFloats; ++j) values[j] = row.scale * float8_value(codes[j]);
    }
  }
  for (; c < dim; ++c) values[c] = quantized_value(storage, codes, c, row);
}

DYNEMB_INLINE RowRange range_of_row(const float* values, int64_t dim) {
  RowRange range;
  for (int64_t c = 0; c < dim; ++c) {
    const int32_t order = float_order(values[c]);
    range.least = order < range.least ? order : range.least;
    range.most = order > range.most ? order : range.most;
  }
  return range;
}

DYNEMB_INLINE void store_quantized_row(Storage storage, const float* __restrict values, int64_t dim,
                                       uint8_t* __restrict to) {
  const RowScale row = row_scale(storage, range_of_row(values, dim));
  store_row_scale(storage, row, to + code_bytes(storage, dim));
  if (!is_finite(row.scale)) {
    std::memset(to, 0, static_cast<size_t>(code_bytes(storage, dim)));
  } else if (storage == Storage::kInt8) {
    for (int64_t c = 0; c < dim; ++c) to[c] = static_cast<uint8_t>(int8_code(values[c], row));
  } else if (storage == Storage::kInt4) {
    for (int64_t c = 0; c < dim; c += 2) {
      const uint32_t low = int4_code(values[c], row);
      to[c / 2] = static_cast<uint8_t>(low | int4_code(values[c + 1], row) << 4);
    }
  } else {
    for (int64_t c = 0; c < dim; ++c) to[c] = static_cast<uint8_t>(float8_code(values[c], row));
  }
}

}  // namespace dynemb::cpu
