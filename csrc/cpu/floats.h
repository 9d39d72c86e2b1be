// Loads and stores of eight floats as one value.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/optimizer_step.h"
#include "cpu/simd.h"

namespace dynemb::cpu {

constexpr int64_t kFloats = 8;

DYNEMB_INLINE Floats8 load_floats(const float* from) {
  Floats8 value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

DYNEMB_INLINE void store_floats(float* to, Floats8 value) { std::memcpy(to, &value, sizeof value); }

}  // namespace dynemb::cpu
