// The backward's dedupe on the device: occurrences of ids sorted by row, so that each row's
// gradients form a run that is summed in the order of occurrence (core/optimizer/summation.h). No
// float atomics.
#pragma once

#include "core/optimizer/summation.h"
#include "cuda/rows/tensors.cuh"

namespace dynemb::cuda {

// What a lookup's output gradient gives each occurrence of an id.
struct GradientArgs {
  const float* gradient;  // [batch or ids, columns]
  const uint32_t* bag;    // of each occurrence; nullptr without pooling
  const float* scale;     // factor of each bag under mean pooling; nullptr otherwise
  LookupArgs lookup;
};

struct Occurrence {
  int64_t offset;  // of its gradient
  float factor;
};
__device__ __forceinline__ Occurrence occurrence(const GradientArgs& args, int64_t position) {
  const LookupArgs& lookup = args.lookup;
  if (args.bag == nullptr) return {position * lookup.columns, 1.0f};
  const int64_t bag = args.bag[position];
  float factor = lookup.id_weights == nullptr ? 1.0f : lookup.id_weights[position];
  if (args.scale != nullptr) factor *= args.scale[bag];
  const int64_t feature = lookup.features.features == 1 ? 0 : bag / lookup.features.batch;
  const int64_t row = bag - feature * lookup.features.batch;
  return {row * lookup.columns + lookup.column[feature], factor};
}

// Runs of all slabs, slab after slab, rows ascending.
struct GradientRuns {
  const uint32_t* positions;  // occurrences, sorted by row, then by position
  const int32_t* begin;       // [runs + 1] first occurrence of each run
  const int64_t* slab_first;  // [slabs + 1] first run of each slab
  const int32_t* piece;       // [runs] first piece of a run longer than kPieceLength, or -1
  const int32_t* piece_run;   // [pieces]
  const int32_t* piece_from;  // [pieces] first occurrence
  const int64_t* piece_count;
  float* piece_sums;  // [pieces, piece_width]
  int64_t piece_width;
};

// Sum of occurrences [begin, end) in the columns of load_sweeps, by a group of lanes. All lanes of
// the group must call it.
template <int kSweeps, class Group>
__device__ __forceinline__ auto sum_occurrences(const Group& group, const GradientArgs& args,
                                                const uint32_t* positions, int64_t begin,
                                                int64_t end, int64_t column, int64_t dim) {
  constexpr int kInFlight = 4;
  constexpr int kValues = Group::kWidth * kSweeps;
  Floats<kValues> sum = zero_floats<kValues>();
  for (int64_t i = begin; i < end; i += group.size()) {
    const int64_t own_index = i + group.lane();
    Occurrence own{0, 0.0f};
    if (own_index < end) own = occurrence(args, positions[own_index]);
    const int count = static_cast<int>(min(static_cast<int64_t>(group.size()), end - i));
    for (int j = 0; j < count; j += kInFlight) {
      Floats<kValues> values[kInFlight];
      float factor[kInFlight];
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        const int from = j + u < count ? j + u : count - 1;
        const int64_t offset = group.broadcast(static_cast<long long>(own.offset), from);
        factor[u] = group.broadcast(own.factor, from);
        values[u] =
            load_sweeps<kSweeps>(group, args.gradient + offset, column, j + u < count ? dim : 0);
      }
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        if (j + u >= count) break;
        const bool first = i == begin && j + u == 0;
#pragma unroll
        for (int k = 0; k < kValues; ++k) {
          const float term = factor[u] * values[u].value[k];
          sum.value[k] = first ? term : sum.value[k] + term;
        }
      }
    }
  }
  return sum;
}

// The sum of a run; where it was cut, add_pieces has left it in its first piece.
template <int kSweeps, class Group>
__device__ __forceinline__ auto sum_run(const Group& group, const GradientArgs& args,
                                        const GradientRuns& runs, int64_t run, int64_t column,
                                        int64_t dim) {
  const int64_t piece = runs.piece[run];
  if (piece >= 0) {
    return load_sweeps<kSweeps>(group, runs.piece_sums + piece * runs.piece_width, column, dim);
  }
  return sum_occurrences<kSweeps>(group, args, runs.positions, runs.begin[run], runs.begin[run + 1],
                                  column, dim);
}

}  // namespace dynemb::cuda
