// Loads and stores of several floats as one value, also from and to bfloat16 and float16. Code that
// has the instruction set as a type takes vectors of sixteen floats where there are registers for
// them, with AVX-512, and of eight elsewhere.
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
template <class Level>
DYNEMB_INLINE Block<Level> load_block(const float* from) {
  Block<Level> block;
  std::memcpy(&block, from, sizeof block);
  return block;
}
template <class Level>
DYNEMB_INLINE void store_block(float* to, const Block<Level>& block) {
  std::memcpy(to, &block, sizeof block);
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

// Sixteen values of bfloat16.
DYNEMB_INLINE void bfloat16_to_floats(Halves16 halves, Floats8* first, Floats8* second) {
  const Halves16 zeros = {};
  *first = reinterpret_cast<Floats8>(__builtin_shuffle(
      zeros, halves, Halves16{0, 16, 0, 17, 0, 18, 0, 19, 0, 20, 0, 21, 0, 22, 0, 23}));
  *second = reinterpret_cast<Floats8>(__builtin_shuffle(
      zeros, halves, Halves16{0, 24, 0, 25, 0, 26, 0, 27, 0, 28, 0, 29, 0, 30, 0, 31}));
}
template <class Level>
DYNEMB_INLINE Block<Level> load_bfloat16(const uint16_t* from) {
  Halves16 halves;
  std::memcpy(&halves, from, sizeof halves);
  Block<Level> block;
  if constexpr (std::is_same_v<Level, V4Level>) {
    block.part[0] = bits_as<Floats16>(__builtin_convertvector(halves, Words16) << 16);
  } else {
    bfloat16_to_floats(halves, &block.part[0], &block.part[1]);
  }
  return block;
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

// How the values of a row are rounded: to nearest, or stochastically with the bits of a key.
struct Rounding {
  bool stochastic;
  uint64_t key;

  // Random words of columns [column, column + 8) and, in the lower halves, of the eight after them;
  // `column` is a multiple of 16.
  DYNEMB_INLINE Words8 words(int64_t column) const {
    const Words8 lanes = {0, 1, 2, 3, 4, 5, 6, 7};
    return rounding_words<Words8>(key, static_cast<uint32_t>(column / 2) + lanes);
  }
  // The random words of columns [column, column + 16).
  DYNEMB_INLINE Words16 words_of_block(int64_t column) const {
    const Words16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7};
    const Words16 shift = {0, 0, 0, 0, 0, 0, 0, 0, 16, 16, 16, 16, 16, 16, 16, 16};
    return rounding_words<Words16>(key, static_cast<uint32_t>(column / 2) + lanes) << shift;
  }
};

constexpr Rounding kToNearest{false, 0};

// Columns [column, column + 16) of a row; `column` is a multiple of 16.
template <class Level>
DYNEMB_INLINE void store_bfloat16(const Rounding& rounding, int64_t column,
                                  const Block<Level>& block, uint16_t* row) {
  if constexpr (std::is_same_v<Level, V4Level>) {
    const Floats16 values = block.part[0];
    const Words16 bits = bits_as<Words16>(values);
    const Words16 rounded = rounding.stochastic ? bfloat16_stochastic_bits(
                                                      values, bits, rounding.words_of_block(column))
                                                : bfloat16_nearest_bits(values, bits);
    store_lower_halves(row + column, rounded >> 16);
    return;
  } else {
    const Floats8 first = block.part[0];
    const Floats8 second = block.part[1];
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
// Neither denormals as zeros nor flushing to zero matters to this instruction.
DYNEMB_TARGET_V3 inline Floats8 processor_float16(Halves8 halves) {
  return reinterpret_cast<Floats8>(_mm256_cvtph_ps(reinterpret_cast<__m128i>(halves)));
}
DYNEMB_TARGET_V4 inline Floats16 processor_float16(Halves16 halves) {
  return reinterpret_cast<Floats16>(
      _mm512_maskz_cvtph_ps(0xffff, reinterpret_cast<__m256i>(halves)));
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

// Columns [column, column + 16) of a row; `column` is a multiple of 16.
template <class Level>
DYNEMB_INLINE void store_float16(const Rounding& rounding, int64_t column,
                                 const Block<Level>& block, uint16_t* row) {
  if constexpr (std::is_same_v<Level, V4Level>) {
    const Words16 bits = bits_as<Words16>(block.part[0]);
    store_lower_halves(
        row + column, rounding.stochastic
                          ? float16_stochastic_bits<Floats16>(bits, rounding.words_of_block(column))
                          : float16_nearest_bits<Floats16>(bits));
    return;
  } else {
    const Words8 low = bits_as<Words8>(block.part[0]);
    const Words8 high = bits_as<Words8>(block.part[1]);
    if (rounding.stochastic) {
      const Words8 words = rounding.words(column);
      store_lower_halves(row + column, float16_stochastic_bits<Floats8>(low, words));
      store_lower_halves(row + column + kFloats,
                         float16_stochastic_bits<Floats8>(high, words << 16));
    } else {
      store_lower_halves(row + column, float16_nearest_bits<Floats8>(low));
      store_lower_halves(row + column + kFloats, float16_nearest_bits<Floats8>(high));
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
