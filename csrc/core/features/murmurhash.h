// MurmurHash3_x64_128, its first 64 bits, and MurmurHash64A (Appleby, SMHasher, public domain).
#pragma once

#include "core/features/bytes.h"
#include "core/index/hash.h"

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

// MurmurHash64A: MurmurHash2 for 64-bit machines. With seed 0xDECAFCAFFE it is TensorFlow's Hash64,
// with seed 0 RecIS's "murmur".
namespace murmur64a {

constexpr uint64_t kM = 0xc6a4a7935bd1e995ULL;

DYNEMB_HD uint64_t mix_shift(uint64_t x) { return x ^ (x >> 47); }
DYNEMB_HD uint64_t begin(uint64_t seed, uint64_t length) { return seed ^ (length * kM); }
DYNEMB_HD uint64_t add_word(uint64_t hash, uint64_t word) {
  return (hash ^ (mix_shift(word * kM) * kM)) * kM;
}
DYNEMB_HD uint64_t end(uint64_t hash) { return mix_shift(mix_shift(hash) * kM); }

}  // namespace murmur64a

DYNEMB_HD uint64_t murmurhash64a(const uint8_t* s, int64_t length, uint64_t seed) {
  uint64_t hash = murmur64a::begin(seed, static_cast<uint64_t>(length));
  int64_t i = 0;
  for (; i + 8 <= length; i += 8) hash = murmur64a::add_word(hash, load64(s + i));
  if (i < length) hash = (hash ^ load_first(s + i, length - i)) * murmur64a::kM;
  return murmur64a::end(hash);
}

// The id of a pair of ids: MurmurHash64A, seed 0, of their 16 bytes in little-endian order, as in
// RecIS (github.com/alibaba/RecIS). Two pairs share an id by chance only.
DYNEMB_HD int64_t crossed_id(int64_t x, int64_t y) {
  uint64_t hash = murmur64a::begin(0, 16);
  hash = murmur64a::add_word(hash, static_cast<uint64_t>(x));
  hash = murmur64a::add_word(hash, static_cast<uint64_t>(y));
  return static_cast<int64_t>(murmur64a::end(hash));
}

}  // namespace dynemb
