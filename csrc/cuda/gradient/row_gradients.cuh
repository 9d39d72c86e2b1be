// Gradients of rows for updates: by the chunk, from runs or reduced entries, and checked for NaN
// and infinity.
#pragma once

#include "core/optimizer/step.h"
#include "cuda/gradient/runs.cuh"

namespace dynemb::cuda {

// The sum of a run in a lane's columns of a chunk.
template <class Group>
__device__ __forceinline__ auto run_chunk(const Group& group, const GradientArgs& gradients,
                                          const GradientRuns& runs, int64_t run, int64_t first,
                                          int64_t dim) {
  return sum_run<Group::kSweeps>(group, gradients, runs, run, group.column(first), dim);
}
template <class Group>
__device__ __forceinline__ auto float_chunk(const Group& group, const float* row, int64_t first,
                                            int64_t dim) {
  return load_sweeps<Group::kSweeps>(group, row, group.column(first), dim);
}

template <int kValues>
__device__ __forceinline__ bool all_finite(const Floats<kValues>& floats) {
  bool finite = true;
#pragma unroll
  for (int j = 0; j < kValues; ++j) {
    finite = finite && (float_bits(floats.value[j]) & 0x7f800000u) != 0x7f800000u;
  }
  return finite;
}

// Output of reduce_grad for a slab.
struct ReducedRows {
  const int64_t* handles;
  const int64_t* ids;
  const int64_t* tables;
  const float* gradients;  // [entries, dim]
  const int64_t* count;
  int64_t capacity;
  const int64_t* updated;  // [tables] 1: the table's step has been advanced
  int64_t table_count;

  // Whether an entry names a row and a table of the slab.
  __device__ __forceinline__ bool is_known(const SlabRows& slab, int64_t slab_number,
                                           const RowArgs& rows, int64_t entry) const {
    const int64_t table = tables[entry];
    return handles[entry] >= 0 && handle_row(handles[entry]) < slab.rows && table >= 0 &&
           table < table_count && rows.meta[table * kMetaColumns + kMetaSlab] == slab_number;
  }
  // Whether 16-byte accesses to gradients and rows are possible.
  bool aligned(const SlabRows& slab) const {
    return reinterpret_cast<uintptr_t>(gradients) % 16 == 0 &&
           reinterpret_cast<uintptr_t>(slab.weights) % 16 == 0;
  }
};

// The part of a started update that a check needs.
struct FiniteCheck {
  SlabRows slab;
  int64_t slab_number;
  RowArgs rows;
  const OptimizerStep* steps;
  const int64_t* updated;
  int64_t table_count;
  const int64_t* raises;  // 0: no table of the call raises
  int64_t* refused;
  int64_t* clock;
  ErrorSink errors;

  __device__ __forceinline__ bool raises_for(int64_t table) const {
    return steps[table].non_finite == NonFinite::kRaise && !steps[table].skip;
  }
  // Cancels the update: the first thread takes back the counts of begin_update.
  __device__ __forceinline__ void refuse(int64_t table) const {
    if (atomicExch(reinterpret_cast<unsigned long long*>(refused), 1ULL) != 0) return;
    for (int64_t t = 0; t < table_count; ++t) {
      if (updated[t] != 0 && !steps[t].skip) --clock[t];
    }
    --clock[table_count + kRowClockUpdates];
    --clock[table_count + kRowClockSinceStep];
    errors.report(kErrorNonFinite, table);
  }
};

}  // namespace dynemb::cuda
