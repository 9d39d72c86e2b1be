// Weighted sums of rows, several rows at once.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/rows/storage.h"
#include "cpu/rows/floats.h"
#include "cpu/runtime/simd.h"

namespace dynemb::cpu {

constexpr int64_t kRowsAtOnce = 16;  // rows summed while a block of columns stays in registers

// Stored rows: float32, bfloat16 or float16.
template <Storage kStorage>
using Stored = std::conditional_t<kStorage == Storage::kFloat32, float, uint16_t>;

// A vector of the level, or a block of columns, as floats.
template <class Level, Storage kStorage>
DYNEMB_INLINE Block<Level> load_stored(const Stored<kStorage>* from) {
  if constexpr (kStorage == Storage::kBFloat16) {
    return load_bfloat16<Level>(from);
  } else if constexpr (kStorage == Storage::kFloat16) {
    return load_float16_block<Level>(from);
  } else {
    return load_block<Level>(from);
  }
}
template <Storage kStorage>
DYNEMB_INLINE float load_one(const Stored<kStorage>* from) {
  if constexpr (kStorage == Storage::kBFloat16) {
    return bfloat16_to_float(*from);
  } else if constexpr (kStorage == Storage::kFloat16) {
    return float16_to_float(*from);
  } else {
    return *from;
  }
}

// Adds kBlocks blocks of columns, which stay in registers.
template <bool kWeighted, class Level, Storage kStorage, int kBlocks>
DYNEMB_INLINE void add_column_blocks(const Stored<kStorage>* const* row, const float* weight,
                                     int64_t rows, int64_t column, float* out) {
  constexpr int64_t kParts = kBlockFloats / kWidth<Level>;
  Block<Level> sum[kBlocks];
  for (int b = 0; b < kBlocks; ++b) sum[b] = load_block<Level>(out + column + b * kBlockFloats);
  for (int64_t r = 0; r < rows; ++r) {
    const Stored<kStorage>* values = row[r] + column;
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) {
      const Block<Level> terms = load_stored<Level, kStorage>(values + b * kBlockFloats);
      for (int64_t p = 0; p < kParts; ++p) {
        if constexpr (kWeighted) {
          sum[b].part[p] += weight[r] * terms.part[p];
        } else {
          sum[b].part[p] += terms.part[p];
        }
      }
    }
  }
  for (int b = 0; b < kBlocks; ++b) store_block<Level>(out + column + b * kBlockFloats, sum[b]);
}

// out[c] += weight[r] * row[r][c] for all r in order, or without weights, which gives the bits of
// weights of 1. Written with vectors: otherwise the compiler interchanges the loops of a full block
// and makes them scalar.
template <bool kWeighted = true, class Level = BaseLevel, Storage kStorage = Storage::kFloat32>
DYNEMB_INLINE void add_rows(const Stored<kStorage>* const* row, const float* weight, int64_t rows,
                            int64_t dim, float* out) {
  constexpr int kMost = std::is_same_v<Level, V4Level> ? 4 : 2;  // blocks of four vectors
  int64_t c = 0;
  for (; c + kMost * kBlockFloats <= dim; c += kMost * kBlockFloats) {
    add_column_blocks<kWeighted, Level, kStorage, kMost>(row, weight, rows, c, out);
  }
  if (kMost > 2 && c + 2 * kBlockFloats <= dim) {
    add_column_blocks<kWeighted, Level, kStorage, 2>(row, weight, rows, c, out);
    c += 2 * kBlockFloats;
  }
  if (c + kBlockFloats <= dim) {
    add_column_blocks<kWeighted, Level, kStorage, 1>(row, weight, rows, c, out);
    c += kBlockFloats;
  }
  if constexpr (kStorage == Storage::kFloat32) {
    if (c + kFloats <= dim) {
      Floats8 sum = load_floats(out + c);
      for (int64_t r = 0; r < rows; ++r) {
        sum += (kWeighted ? weight[r] : 1.0f) * load_floats(row[r] + c);
      }
      store_floats(out + c, sum);
      c += kFloats;
    }
  }
  for (; c < dim; ++c) {
    for (int64_t r = 0; r < rows; ++r) {
      const float value = load_one<kStorage>(row[r] + c);
      out[c] += kWeighted ? weight[r] * value : value;
    }
  }
}

}  // namespace dynemb::cpu
