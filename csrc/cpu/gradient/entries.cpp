// The sums of runs as entries in memory.
#include <algorithm>
#include <cstring>

#include "cpu/gradient/runs.h"
#include "cpu/runtime/simd.h"

#if DYNEMB_X86
#include <immintrin.h>
#endif

namespace dynemb::cpu {
namespace {

// Sums of at least this many bytes leave the caches before they are read. They are written past the
// caches, which saves reading the lines first and keeps the rows of the forward there.
constexpr int64_t kStreamedBytes = int64_t{1} << 23;

// Whether stream_row can write rows of `dim` floats here.
bool can_stream(const float* to, int64_t dim) {
#if DYNEMB_X86
  return reinterpret_cast<uintptr_t>(to) % 16 == 0 && dim % 4 == 0;
#else
  (void)to, (void)dim;
  return false;
#endif
}

// Copies a row past the caches. Other threads see it after end_stream().
void stream_row(const float* from, int64_t dim, float* to) {
#if DYNEMB_X86
  for (int64_t c = 0; c < dim; c += 4) _mm_stream_ps(to + c, _mm_loadu_ps(from + c));
#else
  std::copy(from, from + dim, to);
#endif
}
void end_stream() {
#if DYNEMB_X86
  _mm_sfence();
#endif
}

}  // namespace

void reduce_runs(const GradientSource& source, const GradientRuns& runs,
                 const ReducedEntries& entries) {
  const LongRuns long_runs = sum_long_runs(source, runs);
  const LookupArgs& lookup = *source.lookup;
  const int64_t dim = runs.dim;
  constexpr int64_t kChunk = 32;
  const int64_t chunks = (runs.count() + kChunk - 1) / kChunk;
  const auto occurrences = static_cast<int64_t>(runs.sorted.size());
  const bool streams =
      runs.count() * dim * 4 >= kStreamedBytes && can_stream(entries.gradient, dim);
  parallel_units(chunks, occurrences, [&](int64_t begin, int64_t end) {
    const float* sums[kChunk];
    std::vector<float> buffer(static_cast<size_t>(streams ? kChunk * dim : 0));
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      const int64_t first = chunk * kChunk;
      const int64_t last = std::min(first + kChunk, runs.count());
      float* to = streams ? buffer.data() : entries.gradient + first * dim;
      sum_runs({&source, &runs, &long_runs, first, last, to, sums});
      for (int64_t r = first; r < last; ++r) {
        const int64_t position = runs.position(runs.run[r]);
        entries.handle[r] = runs.handle(runs.run[r]);
        entries.id[r] = lookup.features.ids[position];
        entries.table[r] = lookup.features.table[source.feature_of(position)];
        float* gradient = entries.gradient + r * dim;
        if (streams) {
          stream_row(sums[r - first], dim, gradient);
        } else if (sums[r - first] != gradient) {
          std::memcpy(gradient, sums[r - first], sizeof(float) * static_cast<size_t>(dim));
        }
      }
    }
    if (streams) end_stream();
  });
}

}  // namespace dynemb::cpu
