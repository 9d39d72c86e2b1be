// Weighted sums of rows, several rows at once.
#pragma once

#include <cstdint>

#include "cpu/rows/floats.h"
#include "cpu/runtime/simd.h"

namespace dynemb::cpu {

constexpr int64_t kRowsAtOnce = 16;  // rows summed while a block of columns stays in registers

// out[c] += weight[r] * row[r][c] for all r in order. Written with vectors: left to itself, the
// compiler interchanges the loops of a full block and makes them scalar.
DYNEMB_INLINE void add_rows(const float* const* row, const float* weight, int64_t rows, int64_t dim,
                            float* out) {
  int64_t c = 0;
  for (; c + 4 * kFloats <= dim; c += 4 * kFloats) {
    Floats8 sum0 = load_floats(out + c);
    Floats8 sum1 = load_floats(out + c + kFloats);
    Floats8 sum2 = load_floats(out + c + 2 * kFloats);
    Floats8 sum3 = load_floats(out + c + 3 * kFloats);
    for (int64_t r = 0; r < rows; ++r) {
      const float* values = row[r] + c;
      sum0 += weight[r] * load_floats(values);
      sum1 += weight[r] * load_floats(values + kFloats);
      sum2 += weight[r] * load_floats(values + 2 * kFloats);
      sum3 += weight[r] * load_floats(values + 3 * kFloats);
    }
    store_floats(out + c, sum0);
    store_floats(out + c + kFloats, sum1);
    store_floats(out + c + 2 * kFloats, sum2);
    store_floats(out + c + 3 * kFloats, sum3);
  }
  for (; c + kFloats <= dim; c += kFloats) {
    Floats8 sum = load_floats(out + c);
    for (int64_t r = 0; r < rows; ++r) sum += weight[r] * load_floats(row[r] + c);
    store_floats(out + c, sum);
  }
  for (; c < dim; ++c) {
    for (int64_t r = 0; r < rows; ++r) out[c] += weight[r] * row[r][c];
  }
}

}  // namespace dynemb::cpu
