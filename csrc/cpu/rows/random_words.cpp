#include "cpu/rows/random_words.h"

#include <cstring>

#include "core/rows/initializer.h"
#include "cpu/runtime/simd.h"

#if DYNEMB_X86
#include <immintrin.h>
#endif

namespace dynemb::cpu {
namespace {

struct WordsJob {
  int64_t seed;
  int64_t id;
  uint32_t first_block;
  int64_t blocks;
  uint32_t* words;
};

DYNEMB_INLINE void make_words_body(const WordsJob& job) {
  uint32_t lane[4][kInitChunk / 4];
  for (int64_t b = 0; b < job.blocks; ++b) {
    const Philox4 block =
        row_random_words(job.seed, job.id, job.first_block + static_cast<uint32_t>(b));
    lane[0][b] = block.word[0];
    lane[1][b] = block.word[1];
    lane[2][b] = block.word[2];
    lane[3][b] = block.word[3];
  }
  for (int64_t b = 0; b < job.blocks; ++b) {
    for (int64_t j = 0; j < 4; ++j) job.words[4 * b + j] = lane[j][b];
  }
}
DYNEMB_SIMD_VARIANTS(make_words, (const WordsJob& job), (job))

#if DYNEMB_X86

typedef uint64_t UnsignedWords8 __attribute__((vector_size(64)));
typedef uint64_t UnsignedWords4 __attribute__((vector_size(32)));

DYNEMB_TARGET_V4 UnsignedWords8 product(uint32_t factor, UnsignedWords8 words) {
  return reinterpret_cast<UnsignedWords8>(
      _mm512_maskz_mul_epu32(0xff, _mm512_set1_epi64(factor), reinterpret_cast<__m512i>(words)));
}

// Eight blocks of philox4x32 in a vector, a word in the low half of each 64-bit lane; the high
// halves are ignored. One instruction gives eight whole products; compilers take three. Each round
// waits for the preceding one, so two vectors take little longer than one.
template <int kVectors>
DYNEMB_TARGET_V4 void make_words_of(const WordsJob& job, int64_t begin) {
  const auto id = static_cast<uint64_t>(job.id);
  const auto seed = static_cast<uint64_t>(job.seed);
  const UnsignedWords8 zero = {};
  UnsignedWords8 c0[kVectors], c1[kVectors], c2[kVectors], c3[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    c0[v] = zero + id;
    c1[v] = zero + (id >> 32);
    c2[v] = UnsignedWords8{0, 1, 2, 3, 4, 5, 6, 7} + job.first_block +
            static_cast<uint64_t>(begin + 8 * v);
    c3[v] = zero;
  }
  uint32_t k0 = static_cast<uint32_t>(seed);
  uint32_t k1 = static_cast<uint32_t>(seed >> 32);
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      const UnsignedWords8 p0 = product(0xD2511F53U, c0[v]);
      const UnsignedWords8 p1 = product(0xCD9E8D57U, c2[v]);
      c0[v] = (p1 >> 32) ^ c1[v] ^ k0;
      c2[v] = (p0 >> 32) ^ c3[v] ^ k1;
      c1[v] = p1;
      c3[v] = p0;
    }
    k0 += 0x9E3779B9U;
    k1 += 0xBB67AE85U;
  }
#pragma GCC unroll 2
  for (int v = 0; v < kVectors; ++v) {
    const UnsignedWords8 front = (c0[v] & 0xffffffffULL) | c1[v] << 32;
    const UnsignedWords8 back = (c2[v] & 0xffffffffULL) | c3[v] << 32;
    const UnsignedWords8 blocks[2] = {
        __builtin_shuffle(front, back, UnsignedWords8{0, 8, 1, 9, 2, 10, 3, 11}),
        __builtin_shuffle(front, back, UnsignedWords8{4, 12, 5, 13, 6, 14, 7, 15})};
    std::memcpy(job.words + 4 * begin + 32 * v, blocks, sizeof blocks);
  }
}

DYNEMB_TARGET_V3 UnsignedWords4 product(UnsignedWords4 factor, UnsignedWords4 words) {
  return reinterpret_cast<UnsignedWords4>(
      _mm256_mul_epu32(reinterpret_cast<__m256i>(factor), reinterpret_cast<__m256i>(words)));
}

// The same with four blocks in a vector. Blocks differ in one word of four, so half of the first
// two rounds is the same for all and needs no vectors.
template <int kVectors>
DYNEMB_TARGET_V3 void make_words_of_four(const WordsJob& job, int64_t begin) {
  constexpr uint64_t kFactor0 = 0xD2511F53U;
  constexpr uint64_t kFactor1 = 0xCD9E8D57U;
  const auto id = static_cast<uint64_t>(job.id);
  const auto seed = static_cast<uint64_t>(job.seed);
  uint32_t k0 = static_cast<uint32_t>(seed);
  uint32_t k1 = static_cast<uint32_t>(seed >> 32);
  const auto next_keys = [&] {
    k0 += 0x9E3779B9U;
    k1 += 0xBB67AE85U;
  };
  const uint64_t first_product = kFactor0 * static_cast<uint32_t>(id);
  const uint64_t second_word = static_cast<uint32_t>(first_product >> 32) ^ k1;
  const uint64_t first_mask = (id >> 32) ^ k0;
  next_keys();
  const uint64_t second_product = kFactor1 * second_word;
  const uint64_t second_mask = (second_product >> 32) ^ k0;
  const uint64_t third_mask = static_cast<uint32_t>(first_product) ^ k1;
  next_keys();
  const UnsignedWords4 zero = {};
  const UnsignedWords4 factor0 = zero + kFactor0;
  const UnsignedWords4 factor1 = zero + kFactor1;
  UnsignedWords4 c0[kVectors], c1[kVectors], c2[kVectors], c3[kVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    const UnsignedWords4 block =
        UnsignedWords4{0, 1, 2, 3} + job.first_block + static_cast<uint64_t>(begin + 4 * v);
    const UnsignedWords4 p1 = product(factor1, block);
    const UnsignedWords4 p0 = product(factor0, (p1 >> 32) ^ first_mask);
    c0[v] = p1 ^ second_mask;
    c1[v] = zero + second_product;
    c2[v] = (p0 >> 32) ^ third_mask;
    c3[v] = p0;
  }
#pragma GCC unroll 8
  for (int round = 2; round < 10; ++round) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const UnsignedWords4 p0 = product(factor0, c0[v]);
      const UnsignedWords4 p1 = product(factor1, c2[v]);
      c0[v] = (p1 >> 32) ^ (c1[v] ^ k0);
      c2[v] = (p0 >> 32) ^ (c3[v] ^ k1);
      c1[v] = p1;
      c3[v] = p0;
    }
    next_keys();
  }
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    const UnsignedWords4 front = (c0[v] & 0xffffffffULL) | c1[v] << 32;
    const UnsignedWords4 back = (c2[v] & 0xffffffffULL) | c3[v] << 32;
    const UnsignedWords4 blocks[2] = {__builtin_shuffle(front, back, UnsignedWords4{0, 4, 1, 5}),
                                      __builtin_shuffle(front, back, UnsignedWords4{2, 6, 3, 7})};
    std::memcpy(job.words + 4 * begin + 16 * v, blocks, sizeof blocks);
  }
}

#endif

}  // namespace

void random_words(int64_t seed, int64_t id, int64_t first_column, int64_t columns,
                  uint32_t* words) {
  const WordsJob job{seed, id, static_cast<uint32_t>(first_column / 4), (columns + 3) / 4, words};
#if DYNEMB_X86
  const int level = active_simd_level.load(std::memory_order_relaxed);
  int64_t begin = 0;
  if (level == static_cast<int>(SimdLevel::kV4)) {
    for (; begin + 8 < job.blocks; begin += 16) make_words_of<2>(job, begin);
    if (begin < job.blocks) make_words_of<1>(job, begin);
    return;
  }
  if (level == static_cast<int>(SimdLevel::kV3)) {
    for (; begin + 12 < job.blocks; begin += 16) make_words_of_four<4>(job, begin);
    for (; begin + 4 < job.blocks; begin += 8) make_words_of_four<2>(job, begin);
    if (begin < job.blocks) make_words_of_four<1>(job, begin);
    return;
  }
#endif
  make_words(job);
}

}  // namespace dynemb::cpu
