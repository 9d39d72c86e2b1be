// MurmurHash3_x64_128 (Appleby, SMHasher, public domain), its first 64 bits.
#pragma once

#include "core/bytes.h"
#include "core/hash.h"

namespace dynemb {
namespace murmur {

constexpr uint64_t kA = 0x87c37b91114253d5ULL;
constexpr uint64_t kB = 0x4cf5ad432745937fULL;

DYNEMB_HD uint64_t scramble_first(uint64_t word) { return rotate_left(word * kA, 31) * kB; }
DYNEMB_HD uint64_t scramble_second(uint64_t word) { return rotate_left(word * kB, 33) * kA; }

}  // namespace murmur

DYNEMB_HD uint64_t murmurhash64(const uint8_t* s, int64_t length, uint32_t seed) {
  uint64_t first = seed;
  uint64_t second = seed;
  int64_t i = 0;
  for (; i + 16 <= length; i += 16) {
    first = rotate_left(first ^ murmur::scramble_first(load64(s + i)), 27) + second;
    first = first * 5 + 0x52dce729;
    second = rotate_left(second ^ murmur::scramble_second(load64(s + i + 8)), 31) + first;
    second = second * 5 + 0x38495ab5;
  }
  const int64_t rest = length - i;  // a word of zeros changes nothing
  second ^= murmur::scramble_second(rest > 8 ? load_first(s + i + 8, rest - 8) : 0);
  first ^= murmur::scramble_first(load_first(s + i, rest < 8 ? rest : 8));
  first ^= static_cast<uint64_t>(length);
  second ^= static_cast<uint64_t>(length);
  first += second;
  second += first;
  return fmix64(first) + fmix64(second);
}

}  // namespace dynemb
