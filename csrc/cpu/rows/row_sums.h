// Weighted sums of rows, several rows at once.
#pragma once

#include <cstdint>

#include "cpu/rows/floats.h"
#include "cpu/runtime/simd.h"

namespace dynemb::cpu {

constexpr int64_t kRowsAtOnce = 16;  // rows summed while a block of columns stays in registers

template <bool kWeighted>
DYNEMB_INLINE void add_term(const float* values, float weight, Floats8* sum) {
  if constexpr (kWeighted) {
    *sum += weight * load_floats(values);
  } else {
    *sum += load_floats(values);
  }
}

// Adds kVectors vectors of columns, which stay in registers meanwhile.
template <bool kWeighted, int kVectors>
DYNEMB_INLINE void add_column_block(const float* const* row, const float* weight, int64_t rows,
                                    int64_t column, float* out) {
  Floats8 sum[kVectors];
  for (int v = 0; v < kVectors; ++v) sum[v] = load_floats(out + column + v * kFloats);
  for (int64_t r = 0; r < rows; ++r) {
    const float* values = row[r] + column;
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      add_term<kWeighted>(values + v * kFloats, kWeighted ? weight[r] : 1.0f, &sum[v]);
    }
  }
  for (int v = 0; v < kVectors; ++v) store_floats(out + column + v * kFloats, sum[v]);
}

// out[c] += weight[r] * row[r][c] for all r in order, or without weights, which gives the bits of
// weights of 1. Written with vectors: left to itself, the compiler interchanges the loops of a full
// block and makes them scalar.
template <bool kWeighted = true>
DYNEMB_INLINE void add_rows(const float* const* row, const float* weight, int64_t rows, int64_t dim,
                            float* out) {
  int64_t c = 0;
  for (; c + 4 * kFloats <= dim; c += 4 * kFloats) {
    add_column_block<kWeighted, 4>(row, weight, rows, c, out);
  }
  if (c + 2 * kFloats <= dim) {
    add_column_block<kWeighted, 2>(row, weight, rows, c, out);
    c += 2 * kFloats;
  }
  if (c + kFloats <= dim) {
    add_column_block<kWeighted, 1>(row, weight, rows, c, out);
    c += kFloats;
  }
  for (; c < dim; ++c) {
    for (int64_t r = 0; r < rows; ++r) out[c] += kWeighted ? weight[r] * row[r][c] : row[r][c];
  }
}

}  // namespace dynemb::cpu
