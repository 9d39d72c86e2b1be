// Applies an optimizer to rows: the loop that all optimizers share.
#pragma once

#include <cstdint>

#include "cpu/floats.h"
#include "cpu/initial_row.h"
#include "cpu/rows_view.h"
#include "cpu/simd.h"

namespace dynemb::cpu {

constexpr int kMaxStates = 3;

struct RowUpdate {
  int64_t handle;
  int64_t id;
  int64_t table;
  const float* gradient;
};

struct RowUpdateJob {
  const RowUpdate* rows;
  int64_t count;
  const RowUpdate* next;  // rows of the job after this one: loaded while these are updated
  int64_t next_count;
  const TableRows* tables;
  const OptimizerStep* steps;  // per table
  float* const* state;         // of the slab: element states, then row states
  int64_t stale;               // out: rows that were given away since the forward
};

template <class Optimizer>
DYNEMB_INLINE void update_elements(const OptimizerStep& step, const float* __restrict gradient,
                                   float* __restrict weight, float* __restrict state0,
                                   float* __restrict state1, float* __restrict state2,
                                   int64_t dim) {
  const OptimizerStep s = step;
  for (int64_t c = 0; c < dim; ++c) {
    float w = weight[c];
    float state[kMaxStates] = {};
    if constexpr (Optimizer::kElementStates > 0) state[0] = state0[c];
    if constexpr (Optimizer::kElementStates > 1) state[1] = state1[c];
    if constexpr (Optimizer::kElementStates > 2) state[2] = state2[c];
    Optimizer::element(s, gradient[c], w, state);
    weight[c] = w;
    if constexpr (Optimizer::kElementStates > 0) state0[c] = state[0];
    if constexpr (Optimizer::kElementStates > 1) state1[c] = state[1];
    if constexpr (Optimizer::kElementStates > 2) state2[c] = state[2];
  }
}

// The sum of squares has a fixed number of lanes, so its bits do not depend on the instruction set.
template <class Optimizer>
DYNEMB_INLINE void update_whole_row(const OptimizerStep& step, const float* __restrict gradient,
                                    float* __restrict weight, float* __restrict row_state,
                                    int64_t dim) {
  constexpr int64_t kLanes = 2 * kFloats;
  const OptimizerStep s = step;
  Floats8 low = {};
  Floats8 high = {};
  int64_t c = 0;
  for (; c + kLanes <= dim; c += kLanes) {
    const Floats8 g0 =
        Optimizer::effective_gradient(s, load_floats(gradient + c), load_floats(weight + c));
    const Floats8 g1 = Optimizer::effective_gradient(s, load_floats(gradient + c + kFloats),
                                                     load_floats(weight + c + kFloats));
    low += g0 * g0;
    high += g1 * g1;
  }
  float lane[kLanes];
  store_floats(lane, low);
  store_floats(lane + kFloats, high);
  for (int64_t j = c; j < dim; ++j) {
    const float g = Optimizer::effective_gradient(s, gradient[j], weight[j]);
    lane[j - c] += g * g;
  }
  low = load_floats(lane) + load_floats(lane + kFloats);
  store_floats(lane, low);
  for (int half = kFloats / 2; half > 0; half /= 2) {
    for (int j = 0; j < half; ++j) lane[j] += lane[j + half];
  }
  const float scale = Optimizer::row_scale(s, lane[0] / static_cast<float>(dim), row_state);
  for (c = 0; c + kFloats <= dim; c += kFloats) {
    const Floats8 w = load_floats(weight + c);
    store_floats(weight + c,
                 w - scale * Optimizer::effective_gradient(s, load_floats(gradient + c), w));
  }
  for (; c < dim; ++c) {
    weight[c] -= scale * Optimizer::effective_gradient(s, gradient[c], weight[c]);
  }
}

template <class Optimizer>
DYNEMB_INLINE void reset_state(const RowUpdateJob& job, int64_t row, int64_t dim, float value) {
  for (int k = 0; k < Optimizer::kElementStates; ++k) {
    for (int64_t c = 0; c < dim; ++c) job.state[k][row * dim + c] = value;
  }
  for (int k = 0; k < Optimizer::kRowStates; ++k) {
    job.state[Optimizer::kElementStates + k][row] = value;
  }
}

// Starts loading what update_rows will touch for a row.
template <class Optimizer>
DYNEMB_INLINE void prefetch_update(const RowUpdateJob& job, const RowUpdate& update) {
  const TableRows& table = job.tables[update.table];
  const int64_t row = handle_row(update.handle);
  const int64_t dim = table.dim;
  const int64_t prefetched = dim < 128 ? dim : 128;
  __builtin_prefetch(table.generations + row, 1);
  for (int64_t c = 0; c < prefetched; c += 16) {
    __builtin_prefetch(table.weights + row * dim + c, 1);
    for (int k = 0; k < Optimizer::kElementStates; ++k) {
      __builtin_prefetch(job.state[k] + row * dim + c, 1);
    }
  }
  for (int k = 0; k < Optimizer::kRowStates; ++k) {
    __builtin_prefetch(job.state[Optimizer::kElementStates + k] + row, 1);
  }
}

template <class Optimizer>
DYNEMB_INLINE void update_rows_body(RowUpdateJob& job, Optimizer) {
  for (int64_t k = 0; k < job.count; ++k) {
    if (k < job.next_count) prefetch_update<Optimizer>(job, job.next[k]);
    const RowUpdate& update = job.rows[k];
    const TableRows& table = job.tables[update.table];
    const OptimizerStep& step = job.steps[update.table];
    const int64_t row = handle_row(update.handle);
    const int64_t dim = table.dim;
    float* weight = table.weights + row * dim;
    const RowStatus status = row_status(update.handle, table.generations[row]);
    if (status == RowStatus::kStale) {
      ++job.stale;
      continue;
    }
    if (status == RowStatus::kUnwritten) {
      write_initial_row(table, table.init_begin, table.init_count, update.id, weight);
      reset_state<Optimizer>(job, row, dim, step.initial_state);
      table.generations[row] = handle_generation(update.handle);
    }
    if constexpr (Optimizer::kRowStates == 0) {
      float* state0 = Optimizer::kElementStates > 0 ? job.state[0] + row * dim : nullptr;
      float* state1 = Optimizer::kElementStates > 1 ? job.state[1] + row * dim : nullptr;
      float* state2 = Optimizer::kElementStates > 2 ? job.state[2] + row * dim : nullptr;
      update_elements<Optimizer>(step, update.gradient, weight, state0, state1, state2, dim);
    } else {
      update_whole_row<Optimizer>(step, update.gradient, weight, job.state[0] + row, dim);
    }
  }
}
DYNEMB_SIMD_TEMPLATE_VARIANTS(template <class Optimizer>, update_rows,
                              (RowUpdateJob & job, Optimizer optimizer), (job, optimizer))

}  // namespace dynemb::cpu
