// Little-endian words from unaligned bytes, for hashes of strings.
#pragma once

#include "core/host_device.h"

namespace dynemb {

DYNEMB_HD uint64_t load32(const uint8_t* s) {
  return static_cast<uint32_t>(s[0]) | static_cast<uint32_t>(s[1]) << 8 |
         static_cast<uint32_t>(s[2]) << 16 | static_cast<uint32_t>(s[3]) << 24;
}
DYNEMB_HD uint64_t load64(const uint8_t* s) {
  return static_cast<uint64_t>(s[0]) | static_cast<uint64_t>(s[1]) << 8 |
         static_cast<uint64_t>(s[2]) << 16 | static_cast<uint64_t>(s[3]) << 24 |
         static_cast<uint64_t>(s[4]) << 32 | static_cast<uint64_t>(s[5]) << 40 |
         static_cast<uint64_t>(s[6]) << 48 | static_cast<uint64_t>(s[7]) << 56;
}
// The first `count` bytes, at most 8; 0 in the others.
DYNEMB_HD uint64_t load_first(const uint8_t* s, int64_t count) {
  uint64_t word = 0;
  for (int64_t i = 0; i < count; ++i) word |= static_cast<uint64_t>(s[i]) << (8 * i);
  return word;
}

DYNEMB_HD uint64_t rotate_left(uint64_t x, int bits) { return (x << bits) | (x >> (64 - bits)); }
DYNEMB_HD uint64_t rotate_right(uint64_t x, int bits) { return (x >> bits) | (x << (64 - bits)); }

}  // namespace dynemb
