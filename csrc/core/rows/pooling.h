#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace dynemb {

// Ways of combining the ids of a bag into one vector; kPoolNone: one vector for each id.
enum Pooling : int64_t { kPoolSum = 0, kPoolMean = 1, kPoolNone = 2 };

// Divides values of a bag by the sum of its weights under mean pooling; by a sum of 0 gives 0.
struct MeanDivisor {
  float lift;  // 1, or a power of two
  float inverse;

  // x / sum, as x * (1 / sum). A reciprocal of a sum below the least normal float may overflow, so
  // the sum and x are lifted into the normal range first, which is exact.
  template <class Float>
  DYNEMB_HD Float divide(Float x) const {
    return x * lift * inverse;
  }
};
DYNEMB_HD MeanDivisor mean_divisor(float sum) {
  constexpr float kLeastNormal = 0x1p-126f;
  const float lift = sum < kLeastNormal && sum > -kLeastNormal ? 0x1p64f : 1.0f;
  return {lift, sum == 0.0f ? 0.0f : 1.0f / (sum * lift)};
}

}  // namespace dynemb
