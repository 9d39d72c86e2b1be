#include "cpu/rows/normal_values.h"

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

DYNEMB_INLINE void normal_body(const ValuesJob& job) {
  const InitParameters p = *job.parameters;
  for (int64_t c = 0; c < job.count; ++c) job.row[c] = normal_value(job.words[c], p);
}
DYNEMB_SIMD_VARIANTS(normal, (const ValuesJob& job), (job))

DYNEMB_INLINE void truncated_normal_body(const ValuesJob& job) {
  const InitParameters p = *job.parameters;
  for (int64_t c = 0; c < job.count; ++c) job.row[c] = truncated_normal_value(job.words[c], p);
}
DYNEMB_SIMD_VARIANTS(truncated_normal, (const ValuesJob& job), (job))

#if DYNEMB_X86

// Three of twenty values are in the tails, which take most of the work: they are collected and
// computed together. Loops over the columns of a vector are not unrolled, because the compiler
// vectorizes loops only.

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

bool has_widest_vectors() {
  return active_simd_level.load(std::memory_order_relaxed) == static_cast<int>(SimdLevel::kV4);
}

template <class Columns>
void in_widest_vectors(const ValuesJob& job) {
  job.count == kInitChunk ? region_by_region<Columns, true>(job)
                          : region_by_region<Columns, false>(job);
}

#endif

}  // namespace

void normal_values(const InitParameters& p, const uint32_t* words, int64_t count, float* row) {
  const ValuesJob job{&p, words, count, row};
#if DYNEMB_X86
  if (has_widest_vectors()) return in_widest_vectors<NormalColumns>(job);
#endif
  normal(job);
}

void truncated_normal_values(const InitParameters& p, const uint32_t* words, int64_t count,
                             float* row) {
  const ValuesJob job{&p, words, count, row};
#if DYNEMB_X86
  if (has_widest_vectors()) return in_widest_vectors<TruncatedColumns>(job);
#endif
  truncated_normal(job);
}

}  // namespace dynemb::cpu
