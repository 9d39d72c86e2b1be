// Loads and stores of several floats as one value, also from and to bfloat16 and float16. Code with
// the instruction set as a type takes vectors of sixteen floats with AVX-512, and of eight
// elsewhere.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/optimizer/step.h"
#include "core/rows/storage.h"
#include "cpu/runtime/simd.h"

#if DYNEMB_X86
#include <immintrin.h>
#endif

namespace dynemb::cpu {

constexpr int64_t kFloats = 8;

DYNEMB_INLINE Floats8 load_floats(const float* from) {
  Floats8 value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

DYNEMB_INLINE void store_floats(float* to, Floats8 value) { std::memcpy(to, &value, sizeof value); }
DYNEMB_INLINE void store_floats(float* to, Floats16 value) {
  std::memcpy(to, &value, sizeof value);
}

// Vectors of a level, and how many of them are a block of kBlockFloats columns.
template <class Level>
struct VectorOf {
  using Floats = Floats8;
};
template <>
struct VectorOf<V4Level> {
  using Floats = Floats16;
};
template <class Level>
using FloatsOf = typename VectorOf<Level>::Floats;

constexpr int64_t kBlockFloats = 16;
template <class Level>
constexpr int64_t kWidth = sizeof(FloatsOf<Level>) / sizeof(float);
template <class Level>
struct Block {
  FloatsOf<Level> part[kBlockFloats / kWidth<Level>];
};

template <class Level>
DYNEMB_INLINE FloatsOf<Level> load_vector(const float* from) {
  FloatsOf<Level> value;
  std::memcpy(&value, from, sizeof value);
  return value;
}
// Part by part: the compiler copies a block of two vectors as one object through the stack, in
// pieces that the processor does not forward to a load of a vector.
template <class Level>
DYNEMB_INLINE Block<Level> load_block(const float* from) {
  Block<Level> block;
  for (int64_t p = 0; p < kBlockFloats / kWidth<Level>; ++p) {
    block.part[p] = load_vector<Level>(from + p * kWidth<Level>);
  }
  return block;
}
template <class Level>
DYNEMB_INLINE void store_block(float* to, const Block<Level>& block) {
  for (int64_t p = 0; p < kBlockFloats / kWidth<Level>; ++p) {
    store_floats(to + p * kWidth<Level>, block.part[p]);
  }
}

DYNEMB_INLINE float dot(const float* a, const float* b, int64_t count) {
  constexpr int kLanes = 16;  // fixed, so that every instruction set gives the same bits
  float lane[kLanes] = {};
  int64_t c = 0;
  for (; c + kLanes <= count; c += kLanes) {
    for (int j = 0; j < kLanes; ++j) lane[j] += a[c + j] * b[c + j];
  }
  for (int64_t j = c; j < count; ++j) lane[j - c] += a[j] * b[j];
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int j = 0; j < half; ++j) lane[j] += lane[j + half];
  }
  return lane[0];
}

typedef uint32_t Words8 __attribute__((vector_size(32)));
typedef uint32_t Words16 __attribute__((vector_size(64)));
typedef uint16_t Halves8 __attribute__((vector_size(16)));
typedef uint16_t Halves16 __attribute__((vector_size(32)));
typedef uint16_t Halves32 __attribute__((vector_size(64)));

// Sixteen values of bfloat16.
DYNEMB_INLINE void bfloat16_to_floats(Halves16 halves, Floats8* first, Floats8* second) {
  const Halves16 zeros = {};
  *first = reinterpret_cast<Floats8>(__builtin_shuffle(
      zeros, halves, Halves16{0, 16, 0, 17, 0, 18, 0, 19, 0, 20, 0, 21, 0, 22, 0, 23}));
  *second = reinterpret_cast<Floats8>(__builtin_shuffle(
      zeros, halves, Halves16{0, 24, 0, 25, 0, 26, 0, 27, 0, 28, 0, 29, 0, 30, 0, 31}));
}
#if DYNEMB_X86
// The compiler's own conversion consists of two halves.
DYNEMB_TARGET_V4 inline Words16 words_of_halves(Halves16 halves) {
  return reinterpret_cast<Words16>(
      _mm512_maskz_cvtepu16_epi32(0xffff, reinterpret_cast<__m256i>(halves)));
}
#endif
template <class Level>
DYNEMB_INLINE Block<Level> load_bfloat16(const uint16_t* from) {
  Halves16 halves;
  std::memcpy(&halves, from, sizeof halves);
  Block<Level> block;
#if DYNEMB_X86
  if constexpr (std::is_same_v<Level, V4Level>) {
    block.part[0] = bits_as<Floats16>(words_of_halves(halves) << 16);
    return block;
  }
#endif
  if constexpr (!std::is_same_v<Level, V4Level>) {
    bfloat16_to_floats(halves, &block.part[0], &block.part[1]);
    return block;
  }
}
// The upper halves of sixteen words.
DYNEMB_INLINE void store_upper_halves(uint16_t* to, Words8 first, Words8 second) {
  const Halves16 halves =
      __builtin_shuffle(reinterpret_cast<Halves16>(first), reinterpret_cast<Halves16>(second),
                        Halves16{1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31});
  std::memcpy(to, &halves, sizeof halves);
}
DYNEMB_INLINE void store_lower_halves(uint16_t* to, Words8 words) {
  const Halves8 halves = __builtin_convertvector(words, Halves8);
  std::memcpy(to, &halves, sizeof halves);
}
DYNEMB_INLINE void store_lower_halves(uint16_t* to, Words16 words) {
  const Halves16 halves = __builtin_convertvector(words, Halves16);
  std::memcpy(to, &halves, sizeof halves);
}

// Random words of a block of columns and of the block after it.
struct WordsOfTwoBlocks {
  Words16 block[2];
};

// Rounding of a row's values: to nearest, or stochastically with the bits of a key.
struct Rounding {
  bool stochastic;
  uint64_t key;

  // Random words of columns [column, column + 8) and, in the lower halves, of the eight after them;
  // `column` is a multiple of 16.
  DYNEMB_INLINE Words8 words(int64_t column) const {
    const Words8 lanes = {0, 1, 2, 3, 4, 5, 6, 7};
    return rounding_words<Words8>(key, static_cast<uint32_t>(column / 2) + lanes);
  }
  // Random words of columns [column, column + 32), in their upper halves. A word has the bits of
  // two columns of a block, so that sixteen words are enough.
  DYNEMB_INLINE WordsOfTwoBlocks words_of_two_blocks(int64_t column) const {
    const Words16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const auto halves = reinterpret_cast<Halves32>(
        rounding_words<Words16>(key, static_cast<uint32_t>(column / 2) + lanes));
    // upper halves of eight words, then their lower halves; the bits below are arbitrary
    const Halves32 first = {1, 1, 3, 3, 5, 5, 7, 7, 9, 9, 11, 11, 13, 13, 15, 15,
                            0, 0, 2, 2, 4, 4, 6, 6, 8, 8, 10, 10, 12, 12, 14, 14};
    return {reinterpret_cast<Words16>(__builtin_shuffle(halves, first)),
            reinterpret_cast<Words16>(__builtin_shuffle(halves, first + 16))};
  }
};

constexpr Rounding kToNearest{false, 0};

// Blocks of columns that are stored at once: as many as share random words.
template <class Level>
constexpr int64_t kBlocksAtOnce = std::is_same_v<Level, V4Level> ? 2 : 1;

// Blocks of a row, kBlocksAtOnce or one, from `column` on, which is a multiple of 16.
template <class Level, int64_t kBlocks>
DYNEMB_INLINE void store_bfloat16(const Rounding& rounding, int64_t column,
                                  const Block<Level> (&blocks)[kBlocks], uint16_t* row) {
  if constexpr (std::is_same_v<Level, V4Level>) {
    const WordsOfTwoBlocks words =
        rounding.stochastic ? rounding.words_of_two_blocks(column) : WordsOfTwoBlocks{};
    for (int64_t b = 0; b < kBlocks; ++b) {
      const Floats16 values = blocks[b].part[0];
      const auto bits = bits_as<Words16>(values);
      const Words16 rounded = rounding.stochastic
                                  ? bfloat16_stochastic_bits(values, bits, words.block[b])
                                  : bfloat16_nearest_bits(values, bits);
      store_lower_halves(row + column + b * kBlockFloats, rounded >> 16);
    }
  } else {
    static_assert(kBlocks == 1);
    const Floats8 first = blocks[0].part[0];
    const Floats8 second = blocks[0].part[1];
    const Words8 low = reinterpret_cast<Words8>(first);
    const Words8 high = reinterpret_cast<Words8>(second);
    if (rounding.stochastic) {
      const Words8 words = rounding.words(column);
      store_upper_halves(row + column, bfloat16_stochastic_bits(first, low, words),
                         bfloat16_stochastic_bits(second, high, words << 16));
    } else {
      store_upper_halves(row + column, bfloat16_nearest_bits(first, low),
                         bfloat16_nearest_bits(second, high));
    }
  }
}
DYNEMB_INLINE void store_bfloat16(const Rounding& rounding, int64_t column, float value,
                                  uint16_t* row) {
  row[column] =
      rounding.stochastic
          ? bfloat16_stochastic(value, rounding_word(rounding.key, static_cast<uint32_t>(column)))
          : bfloat16_nearest(value);
}

#if DYNEMB_X86
// This instruction ignores denormals-are-zero and flush-to-zero modes.
DYNEMB_TARGET_V3 inline Floats8 processor_float16(Halves8 halves) {
  return reinterpret_cast<Floats8>(_mm256_cvtph_ps(reinterpret_cast<__m128i>(halves)));
}
DYNEMB_TARGET_V4 inline Floats16 processor_float16(Halves16 halves) {
  return reinterpret_cast<Floats16>(
      _mm512_maskz_cvtph_ps(0xffff, reinterpret_cast<__m256i>(halves)));
}

constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT;
constexpr int kTowardsZero = _MM_FROUND_TO_ZERO;
constexpr float kFloat16RandomUnit = 0x1p-37f;  // of 13 random bits below 2^-24

template <int kDirection>
DYNEMB_TARGET_V3 inline void store_processor_float16(Floats8 values, uint16_t* to) {
  const __m128i halves = _mm256_cvtps_ph(reinterpret_cast<__m256>(values), kDirection);
  std::memcpy(to, &halves, sizeof halves);
}
template <int kDirection>
DYNEMB_TARGET_V4 inline void store_processor_float16(Floats16 values, uint16_t* to) {
  const __m256i halves =
      _mm512_maskz_cvtps_ph(0xffff, reinterpret_cast<__m512>(values), kDirection);
  std::memcpy(to, &halves, sizeof halves);
}
#endif

// Values of float16, as many as the vectors of the level have.
template <class Level>
DYNEMB_INLINE FloatsOf<Level> load_float16(const uint16_t* from) {
  std::conditional_t<std::is_same_v<Level, V4Level>, Halves16, Halves8> halves;
  std::memcpy(&halves, from, sizeof halves);
#if DYNEMB_X86
  if constexpr (!std::is_same_v<Level, BaseLevel>) return processor_float16(halves);
#endif
  if constexpr (std::is_same_v<Level, BaseLevel>) {
    const Words8 words = __builtin_convertvector(halves, Words8);
    return bits_as<Floats8>(float16_to_float_bits<Floats8>(words));
  }
}
template <class Level>
DYNEMB_INLINE Block<Level> load_float16_block(const uint16_t* from) {
  Block<Level> block;
  for (int64_t c = 0; c < kBlockFloats; c += kWidth<Level>) {
    block.part[c / kWidth<Level>] = load_float16<Level>(from + c);
  }
  return block;
}

// Values of float16 rounded to nearest, and their bits, by the processor's conversion if there is
// one. It keeps bits of a NaN that float16_nearest_bits does not.
template <class Level, class Floats, class Words>
DYNEMB_INLINE void store_nearest_float16(Floats values, Words bits, uint16_t* to) {
#if DYNEMB_X86
  if constexpr (!std::is_same_v<Level, BaseLevel>) {
    const Words quiet = (bits & 0x80000000u) | 0x7fc00000u;
    store_processor_float16<kNearest>(bits_as<Floats>(values != values ? quiet : bits), to);
  }
#endif
  if constexpr (std::is_same_v<Level, BaseLevel>) {
    store_lower_halves(to, float16_nearest_bits<Floats>(bits));
  }
}

// The same, rounded by float16_stochastic_bits. The processor truncates after the random bits have
// been added below the last one that is kept.
template <class Level, class Floats, class Words>
DYNEMB_INLINE void store_stochastic_float16(Words bits, Words words, uint16_t* to) {
#if DYNEMB_X86
  if constexpr (!std::is_same_v<Level, BaseLevel>) {
    const Words part = words >> 19;
    const Words magnitude = bits & 0x7fffffffu;
    // below 2^-14, the least normal number, results are multiples of 2^-24
    const Floats small =
        bits_as<Floats>(magnitude) + whole_to_float<Floats>(part) * kFloat16RandomUnit;
    const Words rounded = magnitude < 0x38800000u ? bits_as<Words>(small) : magnitude + part;
    const Words special =
        magnitude > 0x7f800000u ? Words{} + 0x7fc00000u : Words{} + 0x7f800000u;  // NaN, infinity
    const Words finite = rounded < 0x47800000u ? rounded : special;
    store_processor_float16<kTowardsZero>(bits_as<Floats>((bits & 0x80000000u) | finite), to);
  }
#endif
  if constexpr (std::is_same_v<Level, BaseLevel>) {
    store_lower_halves(to, float16_stochastic_bits<Floats>(bits, words));
  }
}

// Blocks of a row, kBlocksAtOnce or one, from `column` on, which is a multiple of 16.
template <class Level, int64_t kBlocks>
DYNEMB_INLINE void store_float16(const Rounding& rounding, int64_t column,
                                 const Block<Level> (&blocks)[kBlocks], uint16_t* row) {
  if constexpr (std::is_same_v<Level, V4Level>) {
    const WordsOfTwoBlocks words =
        rounding.stochastic ? rounding.words_of_two_blocks(column) : WordsOfTwoBlocks{};
    for (int64_t b = 0; b < kBlocks; ++b) {
      const Floats16 values = blocks[b].part[0];
      const auto bits = bits_as<Words16>(values);
      uint16_t* to = row + column + b * kBlockFloats;
      if (rounding.stochastic) {
        store_stochastic_float16<Level, Floats16>(bits, words.block[b], to);
      } else {
        store_nearest_float16<Level>(values, bits, to);
      }
    }
  } else {
    static_assert(kBlocks == 1);
    const Floats8 first = blocks[0].part[0];
    const Floats8 second = blocks[0].part[1];
    const auto low = bits_as<Words8>(first);
    const auto high = bits_as<Words8>(second);
    uint16_t* to = row + column;
    if (rounding.stochastic) {
      const Words8 words = rounding.words(column);
      store_stochastic_float16<Level, Floats8>(low, words, to);
      store_stochastic_float16<Level, Floats8>(high, words << 16, to + kFloats);
    } else {
      store_nearest_float16<Level>(first, low, to);
      store_nearest_float16<Level>(second, high, to + kFloats);
    }
  }
}
DYNEMB_INLINE void store_float16(const Rounding& rounding, int64_t column, float value,
                                 uint16_t* row) {
  row[column] =
      rounding.stochastic
          ? float16_stochastic(value, rounding_word(rounding.key, static_cast<uint32_t>(column)))
          : float16_nearest(value);
}

}  // namespace dynemb::cpu
