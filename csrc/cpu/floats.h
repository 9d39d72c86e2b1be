// Eight floats as one value, for loops that must be vectors whatever the compiler thinks of them.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/simd.h"

namespace dynemb::cpu {

constexpr int64_t kFloats = 8;
typedef float Floats8 __attribute__((vector_size(32)));

DYNEMB_INLINE Floats8 load_floats(const float* from) {
  Floats8 value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

DYNEMB_INLINE void store_floats(float* to, Floats8 value) { std::memcpy(to, &value, sizeof value); }

}  // namespace dynemb::cpu
