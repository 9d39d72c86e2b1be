#include "cpu/rows/normal_values.h"

#include "core/rows/normal_quantile.h"
#include "cpu/rows/random_words.h"
#include "cpu/runtime/simd.h"

#if DYNEMB_X86
#include <immintrin.h>
#endif

namespace dynemb::cpu {
namespace {

constexpr int64_t kVector = 16;  // floats of the widest vector

struct QuantilesJob {
  const float* q;
  const float* tail;
  int64_t count;
  float* value;
};

DYNEMB_INLINE void both_regions_body(const QuantilesJob& job) {
  for (int64_t c = 0; c < job.count; ++c) {
    job.value[c] = normal_quantile(job.q[c], job.tail[c]);
  }
}
DYNEMB_SIMD_VARIANTS(both_regions, (const QuantilesJob& job), (job))

#if DYNEMB_X86

// Of twenty values three lie in the tails, which take most of the work: they are collected side by
// side. Vectors are read and written whole, beyond the count.

DYNEMB_TARGET_V4 __mmask16 outer_columns(const QuantilesJob& job, int64_t c) {
  const int64_t left = job.count - c;
  const auto some = static_cast<__mmask16>(left < kVector ? (1U << left) - 1 : 0xffff);
  const __m512 central = _mm512_set1_ps(kCentral);
  const __m512 q = _mm512_loadu_ps(job.q + c);
  const __mmask16 above = _mm512_mask_cmp_ps_mask(some, q, central, _CMP_NLE_UQ);
  return above | _mm512_mask_cmp_ps_mask(some, q, -central, _CMP_NGE_UQ);
}

DYNEMB_TARGET_V4 int64_t collect_tails(const QuantilesJob& job, float* tails) {
  int64_t collected = 0;
  for (int64_t c = 0; c < job.count; c += kVector) {
    const __mmask16 outer = outer_columns(job, c);
    const __m512 tail = _mm512_loadu_ps(job.tail + c);
    _mm512_storeu_ps(tails + collected, _mm512_maskz_compress_ps(outer, tail));
    collected += __builtin_popcount(outer);
  }
  return collected;
}

DYNEMB_TARGET_V4 void put_outer(const QuantilesJob& job, const float* outer) {
  for (int64_t c = 0; c < job.count; c += kVector) {
    const __mmask16 columns = outer_columns(job, c);
    const __m512 value = _mm512_loadu_ps(job.value + c);
    const __m512 put = _mm512_mask_expand_ps(value, columns, _mm512_loadu_ps(outer));
    const __mmask16 negative = _mm512_mask_cmp_ps_mask(columns, _mm512_loadu_ps(job.q + c),
                                                       _mm512_setzero_ps(), _CMP_LT_OQ);
    _mm512_storeu_ps(job.value + c, _mm512_mask_blend_ps(negative, put, -put));
    outer += __builtin_popcount(columns);
  }
}

DYNEMB_TARGET_V4 void region_by_region(const QuantilesJob& job) {
  float outer[kInitChunk + kVector];
  const int64_t collected = collect_tails(job, outer);
  for (int64_t begin = 0; begin < collected; begin += kVector) {
    for (int64_t i = begin; i < begin + kVector; ++i) outer[i] = outer_quantile(outer[i]);
  }
  // The tails are one long chain of operations, which these are computed beside.
  for (int64_t c = 0; c < job.count; ++c) job.value[c] = central_quantile(job.q[c]);
  put_outer(job, outer);
}

#endif

}  // namespace

void normal_quantiles(const float* q, const float* tail, int64_t count, float* value) {
  const QuantilesJob job{q, tail, count, value};
#if DYNEMB_X86
  if (active_simd_level.load(std::memory_order_relaxed) == static_cast<int>(SimdLevel::kV4)) {
    return region_by_region(job);
  }
#endif
  both_regions(job);
}

}  // namespace dynemb::cpu
