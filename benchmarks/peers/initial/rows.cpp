// Reference kernel of initial values of many rows: those of eight rows are computed side by side,
// so that little waits for the result before it, and are written one row after another. It has
// neither table nor handles, and all rows are new. The formulas and the generator are those of the
// library. Without AVX-512, loops are vectors as far as the compiler makes them so.

#include <cstdint>
#include <cstring>

#include "core/rows/initializer.h"

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

using dynemb::InitParameters;

constexpr int64_t kDim = 64;
constexpr int64_t kRows = 8;  // side by side
constexpr int64_t kColumns = kRows * kDim;
constexpr int64_t kVector = 16;  // floats

#ifdef __AVX512F__

typedef uint64_t Words8 __attribute__((vector_size(64)));

inline Words8 product(uint32_t factor, Words8 words) {
  return reinterpret_cast<Words8>(
      _mm512_maskz_mul_epu32(0xff, _mm512_set1_epi64(factor), reinterpret_cast<__m512i>(words)));
}

// Philox4x32-10 as in core/rows/philox.h, sixteen blocks at once: a word in each 64-bit lane.
void random_words(int64_t seed, int64_t id, uint32_t* words) {
  const Words8 none = {};
  const Words8 low = none + 0xffffffffULL;
  Words8 c0[2], c1[2], c2[2], c3[2];
  for (int v = 0; v < 2; ++v) {
    c0[v] = none + static_cast<uint64_t>(id);
    c1[v] = none + (static_cast<uint64_t>(id) >> 32);
    c2[v] = Words8{0, 1, 2, 3, 4, 5, 6, 7} + static_cast<uint64_t>(8 * v);
    c3[v] = none;
  }
  auto k0 = static_cast<uint32_t>(seed);
  auto k1 = static_cast<uint32_t>(static_cast<uint64_t>(seed) >> 32);
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round) {
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      const Words8 p0 = product(0xD2511F53U, c0[v]);
      const Words8 p1 = product(0xCD9E8D57U, c2[v]);
      c0[v] = (p1 >> 32) ^ c1[v] ^ k0;
      c2[v] = (p0 >> 32) ^ c3[v] ^ k1;
      c1[v] = p1;
      c3[v] = p0;
    }
    k0 += 0x9E3779B9U;
    k1 += 0xBB67AE85U;
  }
#pragma GCC unroll 2
  for (int v = 0; v < 2; ++v) {
    const Words8 front = (c0[v] & low) | c1[v] << 32;
    const Words8 back = (c2[v] & low) | c3[v] << 32;
    const Words8 blocks[2] = {__builtin_shuffle(front, back, Words8{0, 8, 1, 9, 2, 10, 3, 11}),
                              __builtin_shuffle(front, back, Words8{4, 12, 5, 13, 6, 14, 7, 15})};
    std::memcpy(words + 32 * v, blocks, sizeof blocks);
  }
}

__mmask16 outer_columns(const float* tail) {
  const __m512 q = _mm512_loadu_ps(tail) - _mm512_set1_ps(0.5f);  // never above 0
  return _mm512_cmp_ps_mask(q, _mm512_set1_ps(-dynemb::kCentral), _CMP_LT_OQ);
}

// Those of the tails, side by side; returns how many there are.
int64_t collect(const float* tail, float* outer) {
  int64_t collected = 0;
  for (int64_t c = 0; c < kColumns; c += kVector) {
    const __mmask16 columns = outer_columns(tail + c);
    _mm512_storeu_ps(outer + collected,
                     _mm512_maskz_compress_ps(columns, _mm512_loadu_ps(tail + c)));
    collected += __builtin_popcount(columns);
  }
  return collected;
}

void put(const float* tail, const float* outer, float* value) {
  for (int64_t c = 0; c < kColumns; c += kVector) {
    const __mmask16 columns = outer_columns(tail + c);
    const __m512 negative = -_mm512_loadu_ps(outer);
    _mm512_storeu_ps(value + c,
                     _mm512_mask_expand_ps(_mm512_loadu_ps(value + c), columns, negative));
    outer += __builtin_popcount(columns);
  }
}

#else

void random_words(int64_t seed, int64_t id, uint32_t* words) {
  for (uint32_t b = 0; b < kDim / 4; ++b) {
    const dynemb::Philox4 block = dynemb::row_random_words(seed, id, b);
    std::memcpy(words + 4 * b, block.word, sizeof block.word);
  }
}

int64_t collect(const float* tail, float* outer) {
  int64_t collected = 0;
  for (int64_t c = 0; c < kColumns; ++c) {
    outer[collected] = tail[c];
    collected += !dynemb::is_central(tail[c] - 0.5f);
  }
  return collected;
}

void put(const float* tail, const float* outer, float* value) {
  for (int64_t c = 0; c < kColumns; ++c) {
    if (!dynemb::is_central(tail[c] - 0.5f)) value[c] = -*outer++;
  }
}

#endif

void normal_rows(int64_t seed, const int64_t* ids, const InitParameters& p, float* rows) {
  uint32_t words[kColumns];
  float tail[kColumns], value[kColumns], outer[kColumns + kVector];
  for (int64_t r = 0; r < kRows; ++r) random_words(seed, ids[r], words + r * kDim);
  for (int64_t c = 0; c < kColumns; ++c) tail[c] = dynemb::normal_tail(words[c]);
  const int64_t collected = (collect(tail, outer) + kVector - 1) / kVector * kVector;
  for (int64_t i = 0; i < collected; ++i) outer[i] = dynemb::outer_quantile(outer[i]);
  for (int64_t c = 0; c < kColumns; ++c) value[c] = dynemb::central_quantile(tail[c] - 0.5f);
  put(tail, outer, value);
  for (int64_t c = 0; c < kColumns; ++c) {
    rows[c] = dynemb::normal_of_quantile(words[c], value[c], p);
  }
}

}  // namespace

extern "C" {

// Normal values of rows of 64 columns of `count` ids, with mean 0 and deviation 1. The same eight
// rows are written again and again: what writing a table's rows takes is not in it.
__attribute__((visibility("default"))) void dynemb_peer_initial_rows(const int64_t* ids,
                                                                     int64_t count, int64_t seed,
                                                                     float* rows) {
  const InitParameters p{0.0f, 1.0f, 0.0f, 0.0f, 0.0f, 0.0f};
  for (int64_t i = 0; i + kRows <= count; i += kRows) normal_rows(seed, ids + i, p, rows);
}

}  // extern "C"
