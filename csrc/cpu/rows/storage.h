// Loads and stores of rows of weights and state as float32, vectorised over their columns.
#pragma once

#include <cstring>

#include "core/rows/storage.h"
#include "cpu/rows/floats.h"
#include "cpu/runtime/simd.h"

namespace dynemb::cpu {

template <class Level = BaseLevel>
DYNEMB_INLINE void load_row(Storage storage, const char* from, int64_t dim, float* values) {
  if (storage == Storage::kFloat32) {
    std::memcpy(values, from, sizeof(float) * static_cast<size_t>(dim));
    return;
  }
  const auto* stored = reinterpret_cast<const uint16_t*>(from);
  if (storage == Storage::kBFloat16) {
    int64_t c = 0;
    for (; c + kBlockFloats <= dim; c += kBlockFloats) {
      store_block<Level>(values + c, load_bfloat16<Level>(stored + c));
    }
    for (; c < dim; ++c) values[c] = bfloat16_to_float(stored[c]);
  } else {
    int64_t c = 0;
    for (; c + kWidth<Level> <= dim; c += kWidth<Level>) {
      store_floats(values + c, load_float16<Level>(stored + c));
    }
    for (; c < dim; ++c) values[c] = float16_to_float(stored[c]);
  }
}

// Stores columns of a row of 16 bits, kBlocks blocks at once; returns the first remaining column.
template <class Level, Storage kStorage, int64_t kBlocks>
DYNEMB_INLINE int64_t store_blocks(const Rounding& rounding, const float* __restrict values,
                                   int64_t column, int64_t dim, uint16_t* __restrict row) {
  for (; column + kBlocks * kBlockFloats <= dim; column += kBlocks * kBlockFloats) {
    Block<Level> blocks[kBlocks];
    for (int64_t b = 0; b < kBlocks; ++b) {
      blocks[b] = load_block<Level>(values + column + b * kBlockFloats);
    }
    if constexpr (kStorage == Storage::kBFloat16) {
      store_bfloat16<Level>(rounding, column, blocks, row);
    } else {
      store_float16<Level>(rounding, column, blocks, row);
    }
  }
  return column;
}
template <class Level, Storage kStorage>
DYNEMB_INLINE void store_halves(const Rounding& rounding, const float* __restrict values,
                                int64_t dim, uint16_t* __restrict row) {
  int64_t c = store_blocks<Level, kStorage, kBlocksAtOnce<Level>>(rounding, values, 0, dim, row);
  c = store_blocks<Level, kStorage, 1>(rounding, values, c, dim, row);
  for (; c < dim; ++c) {
    if constexpr (kStorage == Storage::kBFloat16) {
      store_bfloat16(rounding, c, values[c], row);
    } else {
      store_float16(rounding, c, values[c], row);
    }
  }
}

template <class Level = BaseLevel>
DYNEMB_INLINE void store_row(Storage storage, const Rounding& rounding,
                             const float* __restrict values, int64_t dim, char* __restrict to) {
  if (storage == Storage::kFloat32) {
    std::memcpy(to, values, sizeof(float) * static_cast<size_t>(dim));
    return;
  }
  auto* row = reinterpret_cast<uint16_t*>(to);
  if (storage == Storage::kBFloat16) {
    store_halves<Level, Storage::kBFloat16>(rounding, values, dim, row);
  } else {
    store_halves<Level, Storage::kFloat16>(rounding, values, dim, row);
  }
}

// Rounds values to those that the row can store.
DYNEMB_INLINE void round_row(Storage storage, float* values, int64_t dim) {
  if (storage == Storage::kBFloat16) {
    for (int64_t c = 0; c < dim; ++c) values[c] = bfloat16_to_float(bfloat16_nearest(values[c]));
  } else if (storage == Storage::kFloat16) {
    for (int64_t c = 0; c < dim; ++c) values[c] = float16_to_float(float16_nearest(values[c]));
  }
}

// -- 8-bit state ---------------------------------------------------------------------------------

DYNEMB_INLINE void load_block_row(const char* from, int64_t dim, bool is_unsigned, float* values) {
  const auto* codes = reinterpret_cast<const uint8_t*>(from);
  const char* scales = from + block_codes_bytes(dim);
  for (int64_t first = 0; first < dim; first += kBlockColumns) {
    float scale;
    std::memcpy(&scale, scales + first / kBlockColumns * 4, sizeof scale);
    const int64_t last = first + kBlockColumns < dim ? first + kBlockColumns : dim;
    if (is_unsigned) {
      for (int64_t c = first; c < last; ++c) values[c] = unsigned_code_value(codes[c], scale);
    } else {
      for (int64_t c = first; c < last; ++c) values[c] = signed_code_value(codes[c], scale);
    }
  }
}

DYNEMB_INLINE void store_block_row(const float* __restrict values, int64_t dim, bool is_unsigned,
                                   uint64_t key, char* __restrict to) {
  auto* codes = reinterpret_cast<uint8_t*>(to);
  char* scales = to + block_codes_bytes(dim);
  for (int64_t first = 0; first < dim; first += kBlockColumns) {
    const int64_t last = first + kBlockColumns < dim ? first + kBlockColumns : dim;
    uint32_t most = 0;  // as bits, which have the order of magnitudes
    for (int64_t c = first; c < last; ++c) {
      const uint32_t magnitude = float_bits(values[c]) & 0x7fffffffu;
      most = magnitude > most ? magnitude : most;
    }
    const float scale = block_scale(float_from_bits(most));
    const float inverse = block_inverse(scale);
    std::memcpy(scales + first / kBlockColumns * 4, &scale, sizeof scale);
    for (int64_t c = first; c < last; ++c) {
      const uint32_t word = rounding_word(key, static_cast<uint32_t>(c));
      codes[c] = is_unsigned ? unsigned_code(values[c], inverse, word)
                             : signed_code(values[c], inverse, word);
    }
  }
}

}  // namespace dynemb::cpu
