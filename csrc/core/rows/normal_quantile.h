// Logarithm and normal quantile in single precision, built from IEEE operations only (+ - * / sqrt
// and integer arithmetic), so every compiler, SIMD level and device gives the same bits. This needs
// compilation without contraction to fused multiply-add (-ffp-contract=off, nvcc --fmad=false).
#pragma once

#include <cmath>

#include "core/rows/float_bits.h"

namespace dynemb {

// Natural logarithm of a positive normal float; relative error below 2e-7.
// x = m * 2^e with m in [1/sqrt(2), sqrt(2)); log m = 2 atanh((m - 1) / (m + 1)) by its series.
DYNEMB_HD float log_positive(float x) {
  const int32_t bits = static_cast<int32_t>(float_bits(x));
  const int32_t exponent = (bits - 0x3f3504f3) >> 23;  // 0x3f3504f3: 1 / sqrt(2)
  const float m = float_from_bits(static_cast<uint32_t>(bits - exponent * (1 << 23)));
  const float s = (m - 1.0f) / (m + 1.0f);
  const float s2 = s * s;
  const float series =
      (((s2 * (1.0f / 9.0f) + 1.0f / 7.0f) * s2 + 1.0f / 5.0f) * s2 + 1.0f / 3.0f) * s2 + 1.0f;
  return static_cast<float>(exponent) * 0.693147180559945f + 2.0f * s * series;
}

// Quantile of the standard normal distribution for q = p - 1/2 and tail = min(p, 1 - p) > 1.4e-11.
// Wichura, "Algorithm AS 241: the percentage points of the normal distribution", Applied Statistics
// 37 (1988), routine PPND7: about 1 part in 10^7. Two regions: the central one, and the tails, of
// which outer_quantile gives the absolute value.
constexpr float kCentral = 0.425f;
DYNEMB_HD bool is_central(float q) { return fabsf(q) <= kCentral; }

DYNEMB_HD float central_quantile(float q) {
  const float c = 0.180625f - q * q;
  return q * (((59.109374720f * c + 159.29113202f) * c + 50.434271938f) * c + 3.3871327179f) /
         (((67.187563600f * c + 78.757757664f) * c + 17.895169469f) * c + 1.0f);
}

DYNEMB_HD float outer_quantile(float tail) {
  const float t = sqrtf(-log_positive(tail)) - 1.6f;
  return (((0.17023821103f * t + 1.3067284816f) * t + 2.7568153900f) * t + 1.4234372777f) /
         ((0.12021132975f * t + 0.73700164250f) * t + 1.0f);
}

// Both regions are computed and one is selected: no branch.
DYNEMB_HD float normal_quantile(float q, float tail) {
  const float outer = outer_quantile(tail);
  const float signed_outer = q < 0.0f ? -outer : outer;
  return is_central(q) ? central_quantile(q) : signed_outer;
}

}  // namespace dynemb
