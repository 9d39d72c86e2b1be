// FarmHash Fingerprint64 (Google; Hash64 of its namespace farmhashna, which does not change between
// versions): a 64-bit hash of bytes. Lengths to 16, to 32, to 64 and above have formulas of their
// own. If a length is not a multiple of a word, the last words overlap.
#pragma once

#include "core/features/bytes.h"

namespace dynemb {
namespace farm {

constexpr uint64_t kA = 0xc3a5c85c97cb3127ULL;  // primes between 2^63 and 2^64
constexpr uint64_t kB = 0xb492b66fbe98f273ULL;
constexpr uint64_t kC = 0x9ae16a3b2f90404fULL;

DYNEMB_HD uint64_t fold(uint64_t x) { return x ^ (x >> 47); }

// Two words to one, in the manner of Murmur.
DYNEMB_HD uint64_t join(uint64_t u, uint64_t v, uint64_t multiplier) {
  const uint64_t a = fold((u ^ v) * multiplier);
  return fold((v ^ a) * multiplier) * multiplier;
}

DYNEMB_HD uint64_t length_multiplier(int64_t length) {
  return kC + 2 * static_cast<uint64_t>(length);
}

DYNEMB_HD uint64_t hash_to_16(const uint8_t* s, int64_t length) {
  const uint64_t multiplier = length_multiplier(length);
  if (length >= 8) {
    const uint64_t a = load64(s) + kC;
    const uint64_t b = load64(s + length - 8);
    return join(rotate_right(b, 37) * multiplier + a, (rotate_right(a, 25) + b) * multiplier,
                multiplier);
  }
  if (length >= 4) {
    const uint64_t a = static_cast<uint64_t>(length) + (load32(s) << 3);
    return join(a, load32(s + length - 4), multiplier);
  }
  if (length == 0) return kC;
  const uint64_t y = s[0] + (static_cast<uint64_t>(s[length / 2]) << 8);
  const uint64_t z = static_cast<uint64_t>(length) + (static_cast<uint64_t>(s[length - 1]) << 2);
  return fold(y * kC ^ z * kA) * kC;
}

// Intermediate value of 32 bytes, the first and the last 16 of a string.
struct Halves {
  uint64_t first;
  uint64_t high;
  uint64_t low;
};
DYNEMB_HD Halves halves(uint64_t first, uint64_t second, uint64_t last, uint64_t before_last,
                        uint64_t salt) {
  return {first, rotate_right(first + second, 43) + rotate_right(last, 30) + before_last,
          first + rotate_right(second + salt, 18) + last};
}

DYNEMB_HD uint64_t hash_to_32(const uint8_t* s, int64_t length) {
  const uint64_t multiplier = length_multiplier(length);
  const Halves all = halves(load64(s) * kB, load64(s + 8), load64(s + length - 8) * multiplier,
                            load64(s + length - 16) * kC, kC);
  return join(all.high, all.low, multiplier);
}

DYNEMB_HD uint64_t hash_to_64(const uint8_t* s, int64_t length) {
  const uint64_t multiplier = length_multiplier(length);
  const Halves outer = halves(load64(s) * kC, load64(s + 8), load64(s + length - 8) * multiplier,
                              load64(s + length - 16) * kC, kC);
  const uint64_t joined = join(outer.high, outer.low, multiplier);
  const Halves inner = halves(load64(s + 16) * multiplier, load64(s + 24),
                              (outer.high + load64(s + length - 32)) * multiplier,
                              (joined + load64(s + length - 24)) * multiplier, outer.first);
  return join(inner.high, inner.low, multiplier);
}

struct Pair {
  uint64_t a;
  uint64_t b;
};
// 32 bytes into a pair.
DYNEMB_HD Pair absorb(const uint8_t* s, uint64_t a, uint64_t b) {
  const uint64_t last = load64(s + 24);
  const uint64_t first = a + load64(s);
  const uint64_t sum = first + load64(s + 8) + load64(s + 16);
  return {sum + last, rotate_right(b + first + last, 21) + rotate_right(sum, 44) + first};
}

// 56 bytes that blocks of 64 bytes are mixed into.
struct State {
  uint64_t x;
  uint64_t y;
  uint64_t z;
  Pair v;
  Pair w;

  DYNEMB_HD void mix_block(const uint8_t* s, uint64_t multiplier, uint64_t weight) {
    const uint64_t new_x =
        (rotate_right(x + y + v.a + load64(s + 8), 37) * multiplier) ^ (w.b * weight);
    y = rotate_right(y + v.b + load64(s + 48), 42) * multiplier + v.a * weight + load64(s + 40);
    const uint64_t new_z = rotate_right(z + w.a, 33) * multiplier;
    v = absorb(s, v.b * multiplier, new_x + w.a);
    w = absorb(s + 32, new_z + w.b, y + load64(s + 16));
    x = new_z;
    z = new_x;
  }
};

DYNEMB_HD uint64_t hash_above_64(const uint8_t* s, int64_t length) {
  constexpr uint64_t kSeed = 81;
  constexpr uint64_t kY = kSeed * kB + 113;
  State state{kSeed * kC + load64(s), kY, fold(kY * kC + 113) * kC, {0, 0}, {0, 0}};
  const int64_t before_end = (length - 1) / 64 * 64;  // the last block has 1 to 64 bytes
  for (int64_t i = 0; i < before_end; i += 64) state.mix_block(s + i, kB, 1);
  const uint64_t multiplier = kB + ((state.z & 0xff) << 1);
  state.w.a += static_cast<uint64_t>(length - 1) & 63;
  state.v.a += state.w.a;
  state.w.a += state.v.a;
  state.mix_block(s + length - 64, multiplier, 9);
  return join(join(state.v.a, state.w.a, multiplier) + fold(state.y) * kA + state.z,
              join(state.v.b, state.w.b, multiplier) + state.x, multiplier);
}

}  // namespace farm

DYNEMB_HD uint64_t farmhash64(const uint8_t* s, int64_t length) {
  if (length <= 16) return farm::hash_to_16(s, length);
  if (length <= 32) return farm::hash_to_32(s, length);
  if (length <= 64) return farm::hash_to_64(s, length);
  return farm::hash_above_64(s, length);
}

}  // namespace dynemb
