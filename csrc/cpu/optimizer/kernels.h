// Kernels of the optimizers. Each part_<n>.cpp compiles those of some.
#pragma once

#include <cstdint>

#include "core/optimizer/step.h"
#include "core/rows/float_bits.h"
#include "cpu/rows/args.h"
#include "cpu/rows/state.h"
#include "cpu/runtime/simd.h"

namespace dynemb::cpu {

constexpr int64_t kRowsPerChunk = 32;  // rows updated together while as many are loaded

struct RowUpdate {
  int64_t handle;
  int64_t position;  // of its id
  int64_t table;
  const float* gradient;
};

struct RowUpdateJob {
  const RowUpdate* rows;
  int64_t count;          // at most kRowsPerChunk
  const RowUpdate* next;  // rows of the next job, loaded while these are updated
  int64_t next_count;
  const int64_t* ids;  // by position: read only if the update depends on the id
  const TableRows* tables;
  const OptimizerStep* steps;  // per table
  const SlabState* state;
  float* scratch;      // 2 + kMaxStates rows
  int64_t stale;       // out: rows with stale handles
  int64_t non_finite;  // out: gradients with NaN or infinity, if counted
};

struct OptimizerKernels {
  void (*update_rows)(RowUpdateJob& job);
  void (*prefetch_rows)(const RowUpdateJob& job);  // starts loading the next rows
};

constexpr int kOptimizerParts = 4;  // sources part_<n>.cpp

// The kernels of an optimizer of a part.
template <int kPart>
OptimizerKernels kernels_of_part(int64_t optimizer);

DYNEMB_INLINE bool has_non_finite(const float* values, int64_t count) {
  uint32_t most = 0;
  for (int64_t c = 0; c < count; ++c) {
    const uint32_t exponent = float_bits(values[c]) & 0x7f800000u;
    most = exponent > most ? exponent : most;
  }
  return most == 0x7f800000u;
}

}  // namespace dynemb::cpu
