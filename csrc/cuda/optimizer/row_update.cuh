// The kernels that apply an optimizer to rows, and the host code of their ops.
#pragma once

#include <vector>

#include "arguments/update.h"
#include "core/optimizer/step.h"
#include "cuda/gradient/row_gradients.cuh"
#include "cuda/gradient/runs.h"

namespace dynemb::cuda {

// The rows of one slab with the optimizer's state.
struct UpdateArgs {
  SlabRows slab;
  int64_t slab_number;
  RowArgs rows;
  const OptimizerStep* steps;  // per table
  SlabState state;
  const int64_t* refused;  // not 0: nothing is updated
  int64_t* extra;          // of row_clock
  ErrorSink errors;

  __device__ __forceinline__ void count(RowClockColumn column) const {
    atomicAdd(reinterpret_cast<unsigned long long*>(extra + column), 1ULL);
  }
};

// Weights of a chunk of a row: stored, or initial if the row has not been written yet.
template <class Group>
__device__ __forceinline__ auto row_weights(const Group& group, const SlabRows& slab,
                                            const TableInit& init, bool unwritten, int64_t row,
                                            int64_t id, int64_t first) {
  constexpr int kWidth = Group::kWidth;
  if (!unwritten) return load_chunk(group, slab.storage, slab.row(row), first, slab.dim);
  Floats<Group::kValues> weights = {};
#pragma unroll
  for (int sweep = 0; sweep < Group::kSweeps; ++sweep) {
    const int64_t column = group.column(first, sweep);
    if (column >= slab.dim) continue;
    const Floats<kWidth> part =
        initial_floats<kWidth>(slab.storage, init, init.init_begin, init.init_count, id, column);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) weights.value[sweep * kWidth + i] = part.value[i];
  }
  return weights;
}

template <class Optimizer, int kState>
constexpr bool kUnsignedState = (Optimizer::kUnsignedStates >> kState & 1u) != 0;

// Element states of a chunk of a row, fresh if the row has not been written yet.
template <class Optimizer, int kState = 0, class Group, class States>
__device__ __forceinline__ void load_states(const Group& group, const SlabState& slab,
                                            const OptimizerStep& step, bool unwritten, int64_t row,
                                            int64_t first, int64_t dim, States& state) {
  if constexpr (kState < Optimizer::kElementStates) {
    const Storage storage = slab.storage[kState];
    if (unwritten) {
      const float fresh = kState == 0 ? rounded(storage, step.initial_state) : 0.0f;
#pragma unroll
      for (int j = 0; j < Group::kValues; ++j) state[kState].value[j] = fresh;
    } else {
      state[kState] = load_state<kUnsignedState<Optimizer, kState>>(
          group, storage, slab.element[kState] + row * slab.row_bytes[kState], first, dim);
    }
    load_states<Optimizer, kState + 1>(group, slab, step, unwritten, row, first, dim, state);
  }
}
// All lanes of the group must call it.
template <class Optimizer, int kState = 0, class Group, class States>
__device__ __forceinline__ void store_states(const Group& group, const SlabState& slab,
                                             const Rounding& rounding, int64_t row, int64_t first,
                                             int64_t dim, const States& state) {
  if constexpr (kState < Optimizer::kElementStates) {
    store_state<kUnsignedState<Optimizer, kState>>(
        group, slab.storage[kState], rounding, 1 + kState,
        slab.element[kState] + row * slab.row_bytes[kState], first, dim, state[kState]);
    store_states<Optimizer, kState + 1>(group, slab, rounding, row, first, dim, state);
  }
}

// Passes over the columns of a row. Each needs results of the preceding one for the whole row.
enum RowPass : int {
  kMeasurePass,  // the gradient's norm, NaN and infinity
  kSumPass,      // the optimizer's sums
  kWritePass
};

// Applies the optimizer to one row by a group of lanes. `gradient(first)` gives the reduced
// gradient in a lane's columns of a chunk; all lanes call it. Reads and writes the row and each
// state tensor once (a row wider than a chunk is read in every pass), 4 bytes of generation at
// random.
template <class Optimizer, class Group, class Gradient>
__device__ __forceinline__ void update_row(const Group& group, const UpdateArgs& args,
                                           int64_t handle, int64_t id, int64_t table,
                                           const Gradient& gradient) {
  constexpr int kValues = Group::kValues;
  constexpr int kStates = Optimizer::kElementStates;
  constexpr int kSums = Optimizer::kSums;
  const int lane = group.lane();
  const int64_t row = handle_row(handle);
  const int64_t dim = args.slab.dim;
  const SlabState& slab = args.state;
  const RowStatus status = row_status(handle, args.slab.generations[row]);
  if (status == RowStatus::kStale) {
    if (lane == 0) args.count(kRowClockStale);
    return;
  }
  const bool unwritten = status == RowStatus::kUnwritten;
  OptimizerStep step = args.steps[table];
  if (step.skip && !step.measures) return;
  const TableInit init = table_init(args.rows, table);
  const Rounding rounding{step.stochastic, init.seed, id, step.step};
  int32_t row_steps = 0;
  if constexpr (Optimizer::kRowSteps != RowSteps::kNone) {
    if (slab.steps != nullptr) {
      const int32_t before = unwritten ? 0 : slab.steps[row];
      if constexpr (Optimizer::kRowSteps == RowSteps::kOptional) {
        row_steps = row_step(int64_t{before} + 1);
        correct_bias(step, row_steps);
      } else {
        row_steps = row_step(step.step);
        decay_since(step, step.step - before);
      }
    }
  }
  float row_state[Optimizer::kRowStates + 1] = {};
#pragma unroll
  for (int k = 0; k < Optimizer::kRowStates; ++k) {
    const float fresh = k == 0 && kStates == 0 ? step.initial_state : 0.0f;
    row_state[k] = unwritten ? fresh : slab.of_row[k][row];
  }
  const bool whole = dim <= group.chunk();  // stays in registers from pass to pass
  bool loaded = false;
  Floats<kValues> g = zero_floats<kValues>();
  Floats<kValues> w = zero_floats<kValues>();
  Floats<kValues> state[kStates + 1];
  bool finite = true;
  float squares = 0.0f;
  float factor = 1.0f;
  float sums[kSums + 1] = {};
  RowNumbers numbers = {};
#pragma unroll 1
  for (int pass = step.measures ? kMeasurePass : (kSums > 0 ? kSumPass : kWritePass);
       pass <= kWritePass; ++pass) {
    if (pass == kSumPass && kSums == 0) continue;
    if (pass == kWritePass) {
      numbers = Optimizer::row(step, sums, static_cast<float>(dim), row_state);
    }
#pragma unroll 1
    for (int64_t first = 0; first < dim; first += group.chunk()) {
      if (!loaded) {
        loaded = whole;
        g = gradient(first);
        if (pass != kMeasurePass || whole) {
          w = row_weights(group, args.slab, init, unwritten, row, id, first);
          load_states<Optimizer>(group, slab, step, unwritten, row, first, dim, state);
        }
        if (pass == kMeasurePass) finite = finite && all_finite<kValues>(g);
        if (step.scales) {
#pragma unroll
          for (int j = 0; j < kValues; ++j) g.value[j] = scaled_gradient(step, g.value[j]);
        }
      }
      if (pass == kMeasurePass) {
#pragma unroll
        for (int j = 0; j < kValues; ++j) squares += g.value[j] * g.value[j];
        continue;
      }
      if (pass == kSumPass) {
        if constexpr (kSums > 0) {
#pragma unroll
          for (int j = 0; j < kValues; ++j) {
            if (group.column(first, j / Group::kWidth) >= dim) continue;
            float values[kMaxStates] = {};
#pragma unroll
            for (int k = 0; k < kStates; ++k) values[k] = state[k].value[j];
            Optimizer::add_terms(step, g.value[j] * factor, w.value[j], values, sums);
          }
        }
        continue;
      }
#pragma unroll
      for (int j = 0; j < kValues; ++j) {
        float values[kMaxStates] = {};
#pragma unroll
        for (int k = 0; k < kStates; ++k) values[k] = state[k].value[j];
        Optimizer::element(step, numbers, g.value[j] * factor, w.value[j], values);
#pragma unroll
        for (int k = 0; k < kStates; ++k) state[k].value[j] = values[k];
      }
      store_chunk(group, args.slab.storage, rounding, 0, args.slab.row(row), first, dim, w);
      store_states<Optimizer>(group, slab, rounding, row, first, dim, state);
    }
    if (pass == kMeasurePass) {
      if (step.non_finite != NonFinite::kPropagate && group.any(!finite)) {
        if (lane == 0) args.count(kRowClockNonFinite);
        return;
      }
      if (step.skip) return;
      factor = norm_factor(step, group.sum(squares));
    }
    if (pass == kSumPass) {
#pragma unroll
      for (int k = 0; k < kSums; ++k) sums[k] = group.sum(sums[k]);
    }
  }
  __syncwarp(group.mask());  // all lanes have read generation, state and steps of the row
  if (lane != 0) return;
#pragma unroll
  for (int k = 0; k < Optimizer::kRowStates; ++k) slab.of_row[k][row] = row_state[k];
  if constexpr (Optimizer::kRowSteps != RowSteps::kNone) {
    if (slab.steps != nullptr) slab.steps[row] = row_steps;
  }
  if (slab.dirty_bits != nullptr) slab.dirty_bits[row] = kDirtyForAll;
  if (unwritten) args.slab.generations[row] = handle_generation(handle);
}

// The reduced gradients of an update: runs of occurrences, which are summed on the fly, or entries
// written by reduce_grad or accumulate_grad_.
struct UpdateGradients {
  GradientArgs gradients;
  GradientRuns runs;
  ReducedRows entries;
  bool reduced;  // entries
};

// A group of lanes per row. Runs: 4 * dim bytes an occurrence, at random; entries: 4 * dim bytes in
// order. One kernel for both, and for all small dims: each optimizer has one, and they dominate the
// library's compile time and size.
template <class Optimizer, class Group>
__global__ void update_rows(Group group, UpdateArgs args, UpdateGradients from) {
  if (*args.refused != 0) return;
  const LookupArgs& lookup = from.gradients.lookup;
  const FeatureArgs& features = lookup.features;
  const ReducedRows& entries = from.entries;
  int64_t first = 0;
  int64_t last;
  if (from.reduced) {
    last = *entries.count;
    if (last < 0 || last > entries.capacity) {
      if (thread_number() == 0) args.errors.report(kErrorCount, args.slab_number);
      return;
    }
  } else {
    first = from.runs.slab_first[args.slab_number];
    last = from.runs.slab_first[args.slab_number + 1];
  }
  for (int64_t r = first + group.number(); r < last; r += group.total()) {
    int64_t handle, id, table;
    if (from.reduced) {
      handle = entries.handles[r];
      id = entries.ids[r];
      table = entries.tables[r];
      const bool known = entries.is_known(args.slab, args.slab_number, args.rows, r);
      if (!known || entries.updated[table] == 0) {
        if (group.lane() == 0) args.errors.report(known ? kErrorTableUpdated : kErrorEntry, r);
        continue;
      }
    } else {
      const int64_t position = from.runs.positions[from.runs.begin[r]];
      handle = lookup.handles[position];
      id = features.ids[position];
      table = features.table_of(position);
    }
    update_row<Optimizer>(group, args, handle, id, table, [&](int64_t column) {
      const int64_t dim = args.slab.dim;
      return from.reduced ? float_chunk(group, entries.gradients + r * dim, column, dim)
                          : run_chunk(group, from.gradients, from.runs, r, column, dim);
    });
  }
}

// The row tensors of an update, checked against the optimizer, and its scalars on the device.
class UpdateCall {
 public:
  UpdateCall(const Call& call, const GroupRows& rows, const StateKinds& kinds,
             const std::vector<Tensor>& weights, const std::vector<Tensor>& state,
             const std::vector<Tensor>& dirty_bits, const std::vector<Tensor>& copy_on_write,
             const Tensor& row_clock, const Tensor& hyper, const Tensor& updates,
             const char* tables_argument, const std::vector<int64_t>& updated_tables);

  // For non_finite "raise": refuses the update if a gradient has NaN or infinity.
  void check_runs(const Call& call, const GroupRows& rows, size_t s, const GradientSort& sort,
                  int64_t most_runs) const;
  void check_entries(const Call& call, const GroupRows& rows, size_t s,
                     const ReducedRows& entries) const;

  UpdateArgs slab(const Call& call, const GroupRows& rows, size_t s) const;
  // [tables] on the device, 1: the table is updated.
  const int64_t* updated() const { return scratch_.get(updated_part_); }

 private:
  FiniteCheck finite_check(const Call& call, const GroupRows& rows, size_t s) const;

  std::vector<SlabState> state_;  // by slab
  Scratch scratch_;
  Scratch::Part<int64_t> updated_part_;
  Scratch::Part<OptimizerStep> step_part_;
  Scratch::Part<int64_t> head_part_;
  int64_t* clock_;
  int64_t* extra_;
};

// The reduced gradients by slab; the caller sets `updated`.
std::vector<ReducedRows> reduced_rows(const Call& call, const GroupRows& rows,
                                      const std::vector<Tensor>& weights,
                                      const std::vector<Tensor>& handles,
                                      const std::vector<Tensor>& ids,
                                      const std::vector<Tensor>& tables,
                                      const std::vector<Tensor>& gradients, const Tensor& counts);

template <class Optimizer>
void launch_update(const Call& call, const UpdateArgs& args, const UpdateGradients& from,
                   bool aligned, int64_t most_rows) {
  with_lanes(args.slab.dim, aligned, [&](auto group) {
    call.launch_strided(update_rows<Optimizer, decltype(group)>, most_rows * group.size(), group,
                        args, from);
  });
}

}  // namespace dynemb::cuda
