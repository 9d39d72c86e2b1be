#include "cpu/rows/normal_values.h"

#include <algorithm>
#include <cstring>

#include "cpu/rows/random_words.h"
#include "cpu/runtime/simd.h"

#if DYNEMB_X86
#include <immintrin.h>
#endif

namespace dynemb::cpu {
namespace {

struct ValuesJob {
  const InitParameters* parameters;
  const uint32_t* words;
  int64_t count;
  float* row;
};

struct NormalColumns {
  static DYNEMB_INLINE void place(const InitParameters&, uint32_t word, float* q, float* tail) {
    *tail = normal_tail(word);
    *q = *tail - 0.5f;
  }
  static DYNEMB_INLINE float value(const InitParameters& p, uint32_t word, float quantile) {
    return normal_of_quantile(word, quantile, p);
  }
};

struct TruncatedColumns {
  static DYNEMB_INLINE void place(const InitParameters& p, uint32_t word, float* q, float* tail) {
    const float probability = truncated_probability(word, p);
    *q = probability - 0.5f;
    *tail = truncated_tail(probability);
  }
  static DYNEMB_INLINE float value(const InitParameters& p, uint32_t, float quantile) {
    return truncated_normal_of_quantile(quantile, p);
  }
};

// Computes both regions of each column.
template <class Columns>
void column_by_column(const ValuesJob& job) {
  const InitParameters p = *job.parameters;
  for (int64_t c = 0; c < job.count; ++c) {
    float q, tail;
    Columns::place(p, job.words[c], &q, &tail);
    job.row[c] = Columns::value(p, job.words[c], normal_quantile(q, tail));
  }
}

#if DYNEMB_X86

// Three of twenty values are in the tails, which take most of the work: they are collected and
// computed together. Loops over the columns of a vector are not unrolled, because the compiler
// vectorizes loops only.

// The first `left` columns of a vector.
DYNEMB_TARGET_V4 inline __mmask16 first_columns(int64_t left) {
  return static_cast<__mmask16>(left < kWidestVector ? (1U << left) - 1 : 0xffff);
}

DYNEMB_TARGET_V4 inline __mmask16 outer_columns(__mmask16 some, const float* quantiles) {
  const __m512 central = _mm512_set1_ps(kCentral);
  const __m512 q = _mm512_loadu_ps(quantiles);
  const __mmask16 above = _mm512_mask_cmp_ps_mask(some, q, central, _CMP_NLE_UQ);
  return above | _mm512_mask_cmp_ps_mask(some, q, -central, _CMP_NGE_UQ);
}

// kWhole: there are kInitChunk columns, and the compiler schedules all vectors.
template <class Columns, bool kWhole>
DYNEMB_TARGET_V4 void region_by_region(const ValuesJob& job) {
  const InitParameters p = *job.parameters;
  const int64_t count = kWhole ? kInitChunk : job.count;
  float q[kInitChunk];
  float outer[kInitChunk + kWidestVector];  // quantiles of the tails, packed
  __mmask16 tails[kInitChunk / kWidestVector];
  int64_t collected = 0;
  for (int64_t c = 0; c < count; c += kWidestVector) {
    float tail[kWidestVector];
#pragma GCC unroll 1
    for (int64_t i = 0; i < kWidestVector; ++i) {
      Columns::place(p, job.words[c + i], q + c + i, tail + i);
    }
    const __mmask16 columns = outer_columns(first_columns(count - c), q + c);
    _mm512_storeu_ps(outer + collected, _mm512_maskz_compress_ps(columns, _mm512_loadu_ps(tail)));
    collected += __builtin_popcount(columns);
    tails[c / kWidestVector] = columns;
  }
  for (int64_t begin = 0; begin < collected; begin += kWidestVector) {
#pragma GCC unroll 1
    for (int64_t i = begin; i < begin + kWidestVector; ++i) outer[i] = outer_quantile(outer[i]);
  }
  // The tails are one long chain of operations; the central values are computed beside it.
  const float* next = outer;
  for (int64_t c = 0; c < count; c += kWidestVector) {
    float value[kWidestVector];
#pragma GCC unroll 1
    for (int64_t i = 0; i < kWidestVector; ++i) value[i] = central_quantile(q[c + i]);
    const __mmask16 columns = tails[c / kWidestVector];
    const __m512 put =
        _mm512_mask_expand_ps(_mm512_loadu_ps(value), columns, _mm512_loadu_ps(next));
    next += __builtin_popcount(columns);
    const __mmask16 negative =
        _mm512_mask_cmp_ps_mask(columns, _mm512_loadu_ps(q + c), _mm512_setzero_ps(), _CMP_LT_OQ);
    _mm512_storeu_ps(value, _mm512_mask_blend_ps(negative, put, -put));
#pragma GCC unroll 1
    for (int64_t i = 0; i < kWidestVector; ++i) {
      value[i] = Columns::value(p, job.words[c + i], value[i]);
    }
    _mm512_mask_storeu_ps(job.row + c, first_columns(count - c), _mm512_loadu_ps(value));
  }
}

// Without an instruction that packs columns: tails are collected by a loop over their bits, and
// their values are written over those of the central region.
template <class Columns>
DYNEMB_TARGET_V3 void tails_apart(const ValuesJob& job) {
  constexpr int64_t kVector = 8;
  const InitParameters p = *job.parameters;
  const __m256 central = _mm256_set1_ps(kCentral);
  float q[kInitChunk];
  uint64_t outer = 0;  // a bit for each column
  for (int64_t c = 0; c < job.count; c += kVector) {
    float tail[kVector];
    for (int64_t i = 0; i < kVector; ++i) Columns::place(p, job.words[c + i], q + c + i, tail + i);
    const __m256 of_vector = _mm256_loadu_ps(q + c);
    const __m256 above = _mm256_cmp_ps(of_vector, central, _CMP_NLE_UQ);
    const __m256 below = _mm256_cmp_ps(of_vector, -central, _CMP_NGE_UQ);
    const auto bits = static_cast<uint64_t>(_mm256_movemask_ps(_mm256_or_ps(above, below)));
    outer |= bits << c;
  }
  if (job.count < kInitChunk) outer &= (uint64_t{1} << job.count) - 1;
  for (int64_t c = 0; c < job.count; ++c) {
    job.row[c] = Columns::value(p, job.words[c], central_quantile(q[c]));
  }
  uint32_t words[kInitChunk + kVector];
  uint8_t columns[kInitChunk];
  int64_t collected = 0;
  for (uint64_t left = outer; left != 0; left &= left - 1) {
    columns[collected] = static_cast<uint8_t>(__builtin_ctzll(left));
    words[collected] = job.words[columns[collected]];
    ++collected;
  }
  std::memset(words + collected, 0, kVector * sizeof(uint32_t));
  for (int64_t first = 0; first < collected; first += kVector) {
    float values[kVector];
    for (int64_t i = 0; i < kVector; ++i) {
      float of_word, tail;
      Columns::place(p, words[first + i], &of_word, &tail);
      const float quantile = outer_quantile(tail);
      values[i] = Columns::value(p, words[first + i], of_word < 0.0f ? -quantile : quantile);
    }
    const int64_t count = std::min(kVector, collected - first);
    for (int64_t i = 0; i < count; ++i) job.row[columns[first + i]] = values[i];
  }
}

#endif

template <class Columns>
void in_regions(const ValuesJob& job) {
#if DYNEMB_X86
  const int level = active_simd_level.load(std::memory_order_relaxed);
  if (level == static_cast<int>(SimdLevel::kV4)) {
    return job.count == kInitChunk ? region_by_region<Columns, true>(job)
                                   : region_by_region<Columns, false>(job);
  }
  if (level == static_cast<int>(SimdLevel::kV3)) return tails_apart<Columns>(job);
#endif
  column_by_column<Columns>(job);
}

}  // namespace

void normal_values(const InitParameters& p, const uint32_t* words, int64_t count, float* row) {
  in_regions<NormalColumns>({&p, words, count, row});
}

void truncated_normal_values(const InitParameters& p, const uint32_t* words, int64_t count,
                             float* row) {
  in_regions<TruncatedColumns>({&p, words, count, row});
}

}  // namespace dynemb::cpu
