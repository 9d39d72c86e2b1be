// The loop over rows that all optimizers share.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/optimizers.h"
#include "cpu/optimizer/kernels.h"
#include "cpu/rows/copy_on_write.h"
#include "cpu/rows/floats.h"
#include "cpu/rows/initial_row.h"
#include "cpu/runtime/prefetch.h"
#include "cpu/runtime/simd.h"

namespace dynemb::cpu {

// Sums over the columns of a row have a fixed number of lanes, so their bits do not depend on the
// instruction set.
constexpr int64_t kLanes = 2 * kFloats;

// Lanes 0 .. 7 and 8 .. 15, in registers: through memory it would cost more than the row.
DYNEMB_INLINE float sum_lanes(Block<BaseLevel> lanes) {
  Floats8 sum = lanes.part[0] + lanes.part[1];
  sum += __builtin_shuffle(sum, Words8{4, 5, 6, 7, 0, 1, 2, 3});
  sum += __builtin_shuffle(sum, Words8{2, 3, 0, 1, 6, 7, 4, 5});
  return sum[0] + sum[1];
}
template <class Level>
DYNEMB_INLINE Block<BaseLevel> in_halves(const Block<Level>& lanes) {
  Block<BaseLevel> halves;
  std::memcpy(&halves, &lanes, sizeof halves);
  return halves;
}

// Adds the columns after the last multiple of kLanes to the first lanes.
template <class Level>
DYNEMB_INLINE void add_rest(const float* rest, int64_t count, Block<Level>* lanes) {
  float lane[kLanes] = {};
  std::memcpy(lane, rest, sizeof(float) * static_cast<size_t>(count));
  const Block<Level> more = load_block<Level>(lane);
  for (int64_t p = 0; p < kLanes / kWidth<Level>; ++p) lanes->part[p] += more.part[p];
}

template <class Level, class Optimizer>
DYNEMB_INLINE void row_sums(const OptimizerStep& step, const float* __restrict gradient,
                            const float* __restrict weight, float* const* state, int64_t dim,
                            float* sums) {
  constexpr int kSums = Optimizer::kSums;
  constexpr int kStates = Optimizer::kSumsWeights ? Optimizer::kElementStates : 0;
  const OptimizerStep s = step;
  constexpr int64_t kParts = kLanes / kWidth<Level>;
  FloatsOf<Level> part_sums[kParts][kSums] = {};
  int64_t c = 0;
  for (; c + kLanes <= dim; c += kLanes) {
    for (int64_t p = 0; p < kParts; ++p) {
      const int64_t first = c + p * kWidth<Level>;
      FloatsOf<Level> values[kMaxStates] = {};
      for (int k = 0; k < kStates; ++k) values[k] = load_vector<Level>(state[k] + first);
      Optimizer::add_terms(s, load_vector<Level>(gradient + first),
                           load_vector<Level>(weight + first), values, part_sums[p]);
    }
  }
  Block<Level> lanes[kSums];
  for (int k = 0; k < kSums; ++k) {
    for (int64_t p = 0; p < kParts; ++p) lanes[k].part[p] = part_sums[p][k];
  }
  if (c < dim) {
    float rest[kSums][kLanes] = {};
    for (int64_t j = c; j < dim; ++j) {
      float values[kMaxStates] = {};
      float terms[kSums] = {};
      for (int k = 0; k < kStates; ++k) values[k] = state[k][j];
      Optimizer::add_terms(s, gradient[j], weight[j], values, terms);
      for (int k = 0; k < kSums; ++k) rest[k][j - c] = terms[k];
    }
    for (int k = 0; k < kSums; ++k) add_rest(rest[k], dim - c, &lanes[k]);
  }
  for (int k = 0; k < kSums; ++k) sums[k] = sum_lanes(in_halves(lanes[k]));
}

// The weights of a row as floats in memory, or as bfloat16.
struct FloatWeights {
  float* weight;

  template <class Level>
  DYNEMB_INLINE Block<Level> load_block(int64_t c) const {
    return cpu::load_block<Level>(weight + c);
  }
  DYNEMB_INLINE float load(int64_t c) const { return weight[c]; }
  template <class Level>
  DYNEMB_INLINE void store(int64_t c, const Block<Level> (&block)[1]) const {
    store_block<Level>(weight + c, block[0]);
  }
  DYNEMB_INLINE void store(int64_t c, float value) const { weight[c] = value; }
};
struct BFloat16Weights {
  uint16_t* weight;
  Rounding rounding;

  template <class Level>
  DYNEMB_INLINE Block<Level> load_block(int64_t c) const {
    return load_bfloat16<Level>(weight + c);
  }
  DYNEMB_INLINE float load(int64_t c) const { return bfloat16_to_float(weight[c]); }
  template <class Level, int64_t kBlocks>
  DYNEMB_INLINE void store(int64_t c, const Block<Level> (&blocks)[kBlocks]) const {
    store_bfloat16<Level>(rounding, c, blocks, weight);
  }
  DYNEMB_INLINE void store(int64_t c, float value) const {
    store_bfloat16(rounding, c, value, weight);
  }
};
struct Float16Weights {
  uint16_t* weight;
  Rounding rounding;

  template <class Level>
  DYNEMB_INLINE Block<Level> load_block(int64_t c) const {
    return load_float16_block<Level>(weight + c);
  }
  DYNEMB_INLINE float load(int64_t c) const { return float16_to_float(weight[c]); }
  template <class Level, int64_t kBlocks>
  DYNEMB_INLINE void store(int64_t c, const Block<Level> (&blocks)[kBlocks]) const {
    store_float16<Level>(rounding, c, blocks, weight);
  }
  DYNEMB_INLINE void store(int64_t c, float value) const {
    store_float16(rounding, c, value, weight);
  }
};

// One vector of columns.
template <class Level, class Optimizer>
DYNEMB_INLINE void update_vector(const OptimizerStep& s, const RowNumbers& row,
                                 const float* __restrict gradient, float* const* state, int64_t c,
                                 FloatsOf<Level>* weight) {
  FloatsOf<Level> values[kMaxStates] = {};
  for (int k = 0; k < Optimizer::kElementStates; ++k) values[k] = load_vector<Level>(state[k] + c);
  Optimizer::element(s, row, load_vector<Level>(gradient + c), *weight, values);
  for (int k = 0; k < Optimizer::kElementStates; ++k) store_floats(state[k] + c, values[k]);
}

// Updates columns from `column` on, kBlocks blocks at once; returns the first remaining one.
template <class Level, class Optimizer, int64_t kBlocks, class Weights>
DYNEMB_INLINE int64_t update_blocks(const OptimizerStep& s, const RowNumbers& row,
                                    const float* __restrict gradient, const Weights& weights,
                                    float* const* state, int64_t column, int64_t dim) {
  for (; column + kBlocks * kBlockFloats <= dim; column += kBlocks * kBlockFloats) {
    Block<Level> blocks[kBlocks];
    for (int64_t b = 0; b < kBlocks; ++b) {
      const int64_t first = column + b * kBlockFloats;
      blocks[b] = weights.template load_block<Level>(first);
      for (int64_t j = 0; j < kBlockFloats; j += kWidth<Level>) {
        update_vector<Level, Optimizer>(s, row, gradient, state, first + j,
                                        &blocks[b].part[j / kWidth<Level>]);
      }
    }
    weights.template store<Level>(column, blocks);
  }
  return column;
}

// Written with vectors: compilers do not vectorize loops over bfloat16.
template <class Level, class Optimizer, class Weights>
DYNEMB_INLINE void update_elements(const OptimizerStep& step, const RowNumbers& numbers,
                                   const float* __restrict gradient, const Weights& all_weights,
                                   float* const* states, int64_t dim) {
  const OptimizerStep s = step;
  const RowNumbers row = numbers;
  const Weights weights = all_weights;
  float* const state[kMaxStates] = {states[0], states[1], states[2]};
  constexpr bool kIsFloat32 = std::is_same_v<Weights, FloatWeights>;
  int64_t c = 0;
  if constexpr (!kIsFloat32) {
    c = update_blocks<Level, Optimizer, kBlocksAtOnce<Level>>(s, row, gradient, weights, state, c,
                                                              dim);
  }
  c = update_blocks<Level, Optimizer, 1>(s, row, gradient, weights, state, c, dim);
  if constexpr (kIsFloat32) {
    if (c + kFloats <= dim) {
      Floats8 weight = load_floats(weights.weight + c);
      update_vector<BaseLevel, Optimizer>(s, row, gradient, state, c, &weight);
      store_floats(weights.weight + c, weight);
      c += kFloats;
    }
  }
  for (; c < dim; ++c) {
    float weight = weights.load(c);
    float values[kMaxStates] = {};
    for (int k = 0; k < Optimizer::kElementStates; ++k) values[k] = state[k][c];
    Optimizer::element(s, row, gradient[c], weight, values);
    for (int k = 0; k < Optimizer::kElementStates; ++k) state[k][c] = values[k];
    weights.store(c, weight);
  }
}

// The gradient for the optimizer, in `scratch` if it differs; nullptr if the row must not be
// updated.
template <class Level>
DYNEMB_INLINE const float* prepared_gradient(const OptimizerStep& s, const float* gradient,
                                             int64_t dim, float* __restrict scratch,
                                             int64_t* non_finite) {
  for (int64_t c = 0; c < dim; ++c) scratch[c] = scaled_gradient(s, gradient[c]);
  if (!s.measures) return scratch;
  Block<Level> lanes = {};
  int64_t c = 0;
  for (; c + kLanes <= dim; c += kLanes) {
    const Block<Level> values = load_block<Level>(scratch + c);
    for (int64_t p = 0; p < kLanes / kWidth<Level>; ++p) {
      lanes.part[p] += values.part[p] * values.part[p];
    }
  }
  if (c < dim) {
    float rest[kLanes];
    for (int64_t j = c; j < dim; ++j) rest[j - c] = scratch[j] * scratch[j];
    add_rest(rest, dim - c, &lanes);
  }
  if (s.non_finite != NonFinite::kPropagate && has_non_finite(gradient, dim)) {
    ++*non_finite;
    return nullptr;
  }
  const float factor = norm_factor(s, sum_lanes(in_halves(lanes)));
  for (c = 0; c < dim; ++c) scratch[c] *= factor;
  return scratch;
}

// Starts loading what update_rows will touch for a row.
template <class Optimizer>
DYNEMB_INLINE void prefetch_update(const RowUpdateJob& job, const RowUpdate& update) {
  const TableRows& table = job.tables[update.table];
  const int64_t row = handle_row(update.handle);
  bool rounds = table.storage != Storage::kFloat32;
  prefetch_line_of(table.generations + row);
  prefetch_row_bytes(table.row(row), table.row_bytes);
  for (int k = 0; k < Optimizer::kElementStates; ++k) {
    rounds |= job.state->storage[k] != Storage::kFloat32;
    prefetch_row_bytes(job.state->element[k] + row * job.state->row_bytes[k],
                       job.state->row_bytes[k]);
  }
  for (int k = 0; k < Optimizer::kRowStates; ++k) prefetch_line_of(job.state->of_row[k] + row);
  if constexpr (Optimizer::kRowSteps != RowSteps::kNone) {
    if (job.state->steps != nullptr) prefetch_line_of(job.state->steps + row);
  }
  if (job.state->dirty_bits != nullptr) prefetch_line_of(job.state->dirty_bits + row);
  if (rounds) prefetch_line_of(job.ids + update.position);  // the id determines the random bits
}

// Values that an optimizer computes once for a row; updates the row's own state.
template <class Level, class Optimizer>
DYNEMB_INLINE RowNumbers row_numbers(const SlabState& slab, const OptimizerStep& step, int64_t row,
                                     const float* gradient, const float* weight,
                                     float* const* state, int64_t dim) {
  float sums[Optimizer::kSums + 1] = {};
  if constexpr (Optimizer::kSums > 0) {
    row_sums<Level, Optimizer>(step, gradient, weight, state, dim, sums);
  }
  float row_state[kMaxStates] = {};
  for (int k = 0; k < Optimizer::kRowStates; ++k) row_state[k] = slab.of_row[k][row];
  const RowNumbers numbers = Optimizer::row(step, sums, static_cast<float>(dim), row_state);
  for (int k = 0; k < Optimizer::kRowStates; ++k) slab.of_row[k][row] = row_state[k];
  return numbers;
}

// The row must be live.
template <class Level, class Optimizer>
DYNEMB_INLINE void update_row(const RowUpdateJob& job, const TableRows& table,
                              const OptimizerStep& table_step, int64_t row, int64_t position,
                              const float* gradient, const RowNumbers* known, float* scratch) {
  const SlabState& slab = *job.state;
  const int64_t dim = table.dim;
  char* stored_weight = table.row(row);
  const bool direct = table.storage == Storage::kFloat32;
  float* weight = direct ? reinterpret_cast<float*>(stored_weight) : scratch;
  float* state[kMaxStates] = {};
  for (int k = 0; k < Optimizer::kElementStates; ++k) {
    char* stored = slab.element[k] + row * slab.row_bytes[k];
    if (slab.storage[k] == Storage::kFloat32) {
      state[k] = reinterpret_cast<float*>(stored);
      continue;
    }
    state[k] = scratch + (1 + k) * dim;
    if (slab.storage[k] == Storage::kBlockFloat8) {
      load_block_row(stored, dim, (Optimizer::kUnsignedStates >> k & 1u) != 0, state[k]);
    } else {
      load_row<Level>(slab.storage[k], stored, dim, state[k]);
    }
  }
  const OptimizerStep* step = &table_step;
  OptimizerStep own;
  if constexpr (Optimizer::kRowSteps != RowSteps::kNone) {
    if (slab.steps != nullptr) {
      own = table_step;
      if constexpr (Optimizer::kRowSteps == RowSteps::kOptional) {
        slab.steps[row] = row_step(int64_t{slab.steps[row]} + 1);
        correct_bias(own, slab.steps[row]);
      } else {
        Optimizer::since(own, slab.steps[row]);
        slab.steps[row] = row_step(own.step);
      }
      step = &own;
    }
  }
  if (!direct && Optimizer::kSums > 0 && known == nullptr) {
    load_row<Level>(table.storage, stored_weight, dim, weight);
  }
  const RowNumbers numbers = known != nullptr ? *known
                                              : row_numbers<Level, Optimizer>(
                                                    slab, *step, row, gradient, weight, state, dim);
  const auto rounding = [&](int tensor) {
    return Rounding{
        step->stochastic,
        step->stochastic ? rounding_key(table.seed, job.ids[position], step->step, tensor) : 0};
  };
  auto* halves = reinterpret_cast<uint16_t*>(stored_weight);
  if (direct) {
    update_elements<Level, Optimizer>(*step, numbers, gradient, FloatWeights{weight}, state, dim);
  } else if (table.storage == Storage::kBFloat16) {
    update_elements<Level, Optimizer>(*step, numbers, gradient,
                                      BFloat16Weights{halves, rounding(0)}, state, dim);
  } else {
    update_elements<Level, Optimizer>(*step, numbers, gradient, Float16Weights{halves, rounding(0)},
                                      state, dim);
  }
  for (int k = 0; k < Optimizer::kElementStates; ++k) {
    if (slab.storage[k] == Storage::kFloat32) continue;
    char* stored = slab.element[k] + row * slab.row_bytes[k];
    if (slab.storage[k] == Storage::kBlockFloat8) {
      store_block_row(state[k], dim, (Optimizer::kUnsignedStates >> k & 1u) != 0,
                      rounding(1 + k).key, stored);
    } else {
      store_row<Level>(slab.storage[k], rounding(1 + k), state[k], dim, stored);
    }
  }
}

// Whether the values of a row follow from its gradient and own state alone.
template <class Optimizer>
DYNEMB_INLINE bool numbers_of_gradient(const SlabState& slab, const OptimizerStep& step) {
  return Optimizer::kSums > 0 && !Optimizer::kSumsWeights && slab.steps == nullptr &&
         step.l2 == 0.0f && !step.scales && !step.measures && !step.skip;
}

// Rows with stale handles belong to other ids, and are not written.
inline void copy_before_write(const RowUpdateJob& job) {
  for (int64_t k = 0; k < job.count; ++k) {
    const RowUpdate& update = job.rows[k];
    const TableRows& table = job.tables[update.table];
    const int64_t row = handle_row(update.handle);
    if (row_status(update.handle, table.generations[row]) == RowStatus::kStale) continue;
    copy_before_write(*job.state, row, table.row(row), table.row_bytes);
  }
}

template <class Level, class Optimizer>
DYNEMB_INLINE void update_rows_simd_body(RowUpdateJob& job, Optimizer) {
  if (copies_on_write(*job.state)) copy_before_write(job);
  // These come first, for all rows: inside the loop below each row would wait for its own.
  RowNumbers numbers[kRowsPerChunk];
  bool known[kRowsPerChunk] = {};
  [[maybe_unused]] bool zeros = false;
  if constexpr (Optimizer::kSums > 0) {
    for (int64_t k = 0; k < job.count; ++k) {
      const RowUpdate& update = job.rows[k];
      const TableRows& table = job.tables[update.table];
      const OptimizerStep& step = job.steps[update.table];
      const int64_t row = handle_row(update.handle);
      if (!numbers_of_gradient<Optimizer>(*job.state, step)) continue;
      if (row_status(update.handle, table.generations[row]) != RowStatus::kLive) continue;
      // weights are not in the sums: zeros do as well, and need no conversion
      if (!zeros) std::memset(job.scratch, 0, sizeof(float) * static_cast<size_t>(table.dim));
      zeros = true;
      known[k] = true;
      float* const no_state[kMaxStates] = {};
      numbers[k] = row_numbers<Level, Optimizer>(*job.state, step, row, update.gradient,
                                                 job.scratch, no_state, table.dim);
    }
  }
  for (int64_t k = 0; k < job.count; ++k) {
    if (k < job.next_count) prefetch_update<Optimizer>(job, job.next[k]);
    const RowUpdate& update = job.rows[k];
    const TableRows& table = job.tables[update.table];
    const OptimizerStep& step = job.steps[update.table];
    const int64_t row = handle_row(update.handle);
    const RowStatus status = row_status(update.handle, table.generations[row]);
    if (status == RowStatus::kStale) {
      ++job.stale;
      continue;
    }
    const float* gradient = update.gradient;
    if (step.scales || step.measures) {
      gradient = prepared_gradient<Level>(step, gradient, table.dim, job.scratch, &job.non_finite);
    }
    if (gradient == nullptr || step.skip) continue;
    float* scratch = job.scratch + table.dim;
    if (status == RowStatus::kUnwritten) {
      if (table.storage == Storage::kFloat32) {
        write_initial_row(table, table.init_begin, table.init_count, job.ids[update.position],
                          reinterpret_cast<float*>(table.row(row)));
      } else {
        write_initial_row(table, table.init_begin, table.init_count, job.ids[update.position],
                          scratch);
        store_row(table.storage, kToNearest, scratch, table.dim, table.row(row));
      }
      write_fresh_state(*job.state, row, table.dim, step.initial_state);
      table.generations[row] = handle_generation(update.handle);
    }
    update_row<Level, Optimizer>(job, table, step, row, update.position, gradient,
                                 known[k] ? &numbers[k] : nullptr, scratch);
    if (job.state->dirty_bits != nullptr) job.state->dirty_bits[row] = kDirtyForAll;
  }
}
DYNEMB_SIMD_TYPED_TEMPLATE_VARIANTS(template <class Optimizer>, update_rows_simd,
                                    (RowUpdateJob & job, Optimizer optimizer), (job, optimizer))

template <class Optimizer>
void update_rows(RowUpdateJob& job) {
  update_rows_simd(job, Optimizer{});
}

template <class Optimizer>
void prefetch_rows(const RowUpdateJob& job) {
  for (int64_t k = 0; k < job.next_count; ++k) prefetch_update<Optimizer>(job, job.next[k]);
}

template <int kPart>
OptimizerKernels kernels_of_part(int64_t optimizer) {
  OptimizerKernels kernels{};
  for_optimizers_of_part<kPart, kOptimizerParts>([&](int64_t number, auto of) {
    using Optimizer = decltype(of);
    if (number == optimizer) kernels = {update_rows<Optimizer>, prefetch_rows<Optimizer>};
  });
  return kernels;
}

}  // namespace dynemb::cpu
