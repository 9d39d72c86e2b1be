// The backward's dedupe on the device: occurrences of ids sorted by row, so that each row's
// gradients form a run, summed in the order of occurrence (core/optimizer/summation.h). No float
// atomics.
#pragma once

#include "core/optimizer/summation.h"
#include "cuda/rows/tensors.cuh"

namespace dynemb::cuda {

// Gradients of occurrences, from a lookup's output gradient.
struct GradientArgs {
  const float* gradient;       // [batch or ids, columns]
  const uint32_t* bag;         // of each occurrence; nullptr without pooling
  const MeanDivisor* divisor;  // of each bag under mean pooling; nullptr otherwise
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
  if (args.divisor != nullptr) factor = args.divisor[bag].divide(factor);
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
  constexpr int kValues = Group::kWidth * kSweeps;
  struct Row {
    float factor;
    Floats<kValues> values;
  };
  Floats<kValues> sum = zero_floats<kValues>();
  stream_items(
      group, begin, end,
      [&](int64_t i) { return i < end ? occurrence(args, positions[i]) : Occurrence{0, 0.0f}; },
      [&](const Occurrence& seen, int lane, bool wanted) {
        const int64_t offset = group.broadcast(static_cast<long long>(seen.offset), lane);
        return Row{group.broadcast(seen.factor, lane),
                   load_sweeps<kSweeps>(group, args.gradient + offset, column, wanted ? dim : 0)};
      },
      [&](const Row& row, int64_t i) {
#pragma unroll
        for (int k = 0; k < kValues; ++k) {
          const float term = row.factor * row.values.value[k];
          sum.value[k] = i == begin ? term : sum.value[k] + term;
        }
      });
  return sum;
}

// The sum of a run; for a run that was cut, add_pieces has put it into its first piece.
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
