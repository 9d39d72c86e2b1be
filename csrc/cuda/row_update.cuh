// <optimizer>_update_ and <optimizer>_backward_ for one optimizer: what all of them share. A source
// file per optimizer instantiates it.
#pragma once

#include <optional>
#include <vector>

#include "core/optimizer_step.h"
#include "cuda/gradient_runs.h"

namespace dynemb::cuda {

constexpr int kMaxStates = 3;

// The rows of one slab with the optimizer's state.
struct UpdateArgs {
  SlabRows slab;
  int64_t slab_number;
  RowArgs rows;
  const OptimizerStep* steps;  // per table
  float* state[kMaxStates];    // element states, then row states
  const int64_t* refused;      // not 0: the forward saw other rows, nothing is updated
  int64_t* stale;
  ErrorSink errors;
};

// Row-wise optimizers need the whole row before they can change any of it.
template <class Optimizer>
constexpr bool kWholeRow = Optimizer::kRowStates > 0;

// Weights of a row's columns: stored, or initial where the row has not been written yet.
template <int kWidth>
__device__ __forceinline__ Floats<kWidth> row_weights(const UpdateArgs& args, const TableInit& init,
                                                      bool unwritten, int64_t row, int64_t id,
                                                      int64_t column) {
  if (unwritten) {
    return initial_floats<kWidth>(init, init.init_begin, init.init_count, id, column);
  }
  return load_floats<kWidth>(args.slab.weights + row * args.slab.dim + column);
}

// Applies the optimizer to one row by a group of lanes. `gradient(column, active)` gives the
// reduced gradient of kWidth columns; all lanes call it. Reads and writes the row and each state
// tensor once (row-wise ones: a row wider than the group's reach is read twice), 4 bytes of
// generation at random.
template <class Optimizer, int kWidth, int kLanes, class Gradient>
__device__ __forceinline__ void update_row(const UpdateArgs& args, int64_t handle, int64_t id,
                                           int64_t table, const Gradient& gradient) {
  using Group = LaneGroup<kLanes>;
  constexpr int64_t kReach = kLanes * kWidth;
  const int lane = Group::lane();
  const int64_t row = handle_row(handle);
  const int64_t dim = args.slab.dim;
  const RowStatus status = row_status(handle, args.slab.generations[row]);
  if (status == RowStatus::kStale) {
    if (lane == 0) atomicAdd(reinterpret_cast<unsigned long long*>(args.stale), 1ULL);
    return;
  }
  const bool unwritten = status == RowStatus::kUnwritten;
  const OptimizerStep step = args.steps[table];
  const TableInit init = table_init(args.rows, table);
  float* weights = args.slab.weights + row * dim;
  if constexpr (kWholeRow<Optimizer>) {
    float squares = 0.0f;
    Floats<kWidth> g = zero_floats<kWidth>();
    Floats<kWidth> w = zero_floats<kWidth>();
    for (int64_t first = 0; first < dim; first += kReach) {
      const int64_t column = first + lane * kWidth;
      const bool active = column < dim;
      g = gradient(column, active);
      if (!active) continue;
      w = row_weights<kWidth>(args, init, unwritten, row, id, column);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        const float effective = Optimizer::effective_gradient(step, g.value[k], w.value[k]);
        squares += effective * effective;
      }
    }
    squares = Group::sum(squares);
    float row_state = unwritten ? step.initial_state : args.state[0][row];
    const float scale = Optimizer::row_scale(step, squares / static_cast<float>(dim), &row_state);
    for (int64_t first = 0; first < dim; first += kReach) {
      const int64_t column = first + lane * kWidth;
      const bool active = column < dim;
      if (dim > kReach) g = gradient(column, active);
      if (!active) continue;
      if (dim > kReach) w = row_weights<kWidth>(args, init, unwritten, row, id, column);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        w.value[k] -= scale * Optimizer::effective_gradient(step, g.value[k], w.value[k]);
      }
      store_floats<kWidth>(weights + column, w);
    }
    __syncwarp(Group::mask());  // all lanes have read generation and state
    if (lane == 0) {
      args.state[0][row] = row_state;
      if (unwritten) args.slab.generations[row] = handle_generation(handle);
    }
  } else {
    for (int64_t first = 0; first < dim; first += kReach) {
      const int64_t column = first + lane * kWidth;
      const bool active = column < dim;
      const Floats<kWidth> g = gradient(column, active);
      if (!active) continue;
      Floats<kWidth> w = row_weights<kWidth>(args, init, unwritten, row, id, column);
      Floats<kWidth> state[kMaxStates];
#pragma unroll
      for (int k = 0; k < Optimizer::kElementStates; ++k) {
        if (unwritten) {
#pragma unroll
          for (int j = 0; j < kWidth; ++j) state[k].value[j] = step.initial_state;
        } else {
          state[k] = load_floats<kWidth>(args.state[k] + row * dim + column);
        }
      }
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        float values[kMaxStates] = {};
#pragma unroll
        for (int k = 0; k < Optimizer::kElementStates; ++k) values[k] = state[k].value[j];
        Optimizer::element(step, g.value[j], w.value[j], values);
#pragma unroll
        for (int k = 0; k < Optimizer::kElementStates; ++k) state[k].value[j] = values[k];
      }
      store_floats<kWidth>(weights + column, w);
#pragma unroll
      for (int k = 0; k < Optimizer::kElementStates; ++k) {
        store_floats<kWidth>(args.state[k] + row * dim + column, state[k]);
      }
    }
    __syncwarp(Group::mask());
    if (lane == 0 && unwritten) args.slab.generations[row] = handle_generation(handle);
  }
}

// A group of lanes per run: sums its gradients (4 * dim bytes an occurrence) and updates its row.
template <class Optimizer, int kWidth, int kLanes>
__global__ void update_runs(UpdateArgs args, GradientArgs gradients, GradientRuns runs) {
  if (*args.refused != 0) return;
  const LookupArgs& lookup = gradients.lookup;
  const FeatureArgs& features = lookup.features;
  const int64_t last = runs.slab_first[args.slab_number + 1];
  const int64_t stride = thread_total() / kLanes;
  for (int64_t r = runs.slab_first[args.slab_number] + thread_number() / kLanes; r < last;
       r += stride) {
    const int64_t position = runs.positions[runs.begin[r]];
    const int64_t table =
        features.table[features.features == 1 ? 0 : features.feature_of(position)];
    update_row<Optimizer, kWidth, kLanes>(args, lookup.handles[position], features.ids[position],
                                          table, [&](int64_t column, bool active) {
                                            return sum_run<kWidth, kLanes>(gradients, runs, r,
                                                                           column, active);
                                          });
  }
}

// What reduce_grad returned for a slab.
struct ReducedRows {
  const int64_t* handles;
  const int64_t* ids;
  const int64_t* tables;
  const float* gradients;  // [entries, dim]
  const int64_t* count;
  int64_t capacity;
  const int64_t* updated;  // [tables] 1: the table's step has been advanced
  int64_t table_count;
};

// A group of lanes per entry.
template <class Optimizer, int kWidth, int kLanes>
__global__ void update_entries(UpdateArgs args, ReducedRows entries) {
  if (*args.refused != 0) return;
  const int lane = LaneGroup<kLanes>::lane();
  int64_t count = *entries.count;
  if (count < 0 || count > entries.capacity) {
    if (thread_number() == 0) args.errors.report(kErrorCount, args.slab_number);
    return;
  }
  const int64_t stride = thread_total() / kLanes;
  for (int64_t e = thread_number() / kLanes; e < count; e += stride) {
    const int64_t handle = entries.handles[e];
    const int64_t table = entries.tables[e];
    const bool known = handle >= 0 && handle_row(handle) < args.slab.rows && table >= 0 &&
                       table < entries.table_count &&
                       args.rows.meta[table * kMetaColumns + kMetaSlab] == args.slab_number;
    if (!known || entries.updated[table] == 0) {
      if (lane == 0) args.errors.report(known ? kErrorTableUpdated : kErrorEntry, e);
      continue;
    }
    const float* gradient = entries.gradients + e * args.slab.dim;
    update_row<Optimizer, kWidth, kLanes>(
        args, handle, entries.ids[e], table, [&](int64_t column, bool active) {
          return active ? load_floats<kWidth>(gradient + column) : zero_floats<kWidth>();
        });
  }
}

// The row tensors of an update, checked against the optimizer, and its scalars on the device.
class UpdateCall {
 public:
  UpdateCall(const Call& call, const GroupRows& rows, int states, int element_states,
             const std::vector<Tensor>& state, const Tensor& row_clock, const Tensor& hyper,
             const Tensor& updates, const char* tables_argument,
             const std::vector<int64_t>& updated_tables);

  UpdateArgs slab(const Call& call, const GroupRows& rows, size_t s) const;
  // [tables] on the device, 1: the table is updated.
  const int64_t* updated() const { return scratch_.get(updated_part_); }

 private:
  std::vector<std::vector<float*>> state_;  // [slab][state]
  Scratch scratch_;
  Scratch::Part<int64_t> updated_part_;
  Scratch::Part<OptimizerStep> step_part_;
  Scratch::Part<int64_t> refused_part_;
  int64_t* stale_;
};

// The reduced gradients by slab, checked; `updated` is to be set.
std::vector<ReducedRows> reduced_rows(const Call& call, const GroupRows& rows,
                                      const std::vector<Tensor>& handles,
                                      const std::vector<Tensor>& ids,
                                      const std::vector<Tensor>& tables,
                                      const std::vector<Tensor>& gradients, const Tensor& counts);

template <class Optimizer>
struct LaunchRuns {
  const Call& call;
  const UpdateArgs& args;
  const GradientSort& sort;
  int64_t most_runs;

  template <int kWidth, int kLanes>
  void run() const {
    call.launch_strided(update_runs<Optimizer, kWidth, kLanes>, most_runs * kLanes, args,
                        sort.args(), sort.runs());
  }
};

template <class Optimizer>
struct LaunchEntries {
  const Call& call;
  const UpdateArgs& args;
  const ReducedRows& entries;

  template <int kWidth, int kLanes>
  void run() const {
    call.launch_strided(update_entries<Optimizer, kWidth, kLanes>, entries.capacity * kLanes, args,
                        entries);
  }
};

template <class Optimizer>
void backward(const char* op, const std::vector<Tensor>& weights,
              const std::vector<Tensor>& generations, const std::vector<Tensor>& state,
              const Tensor& row_clock, const Tensor& hyper, const Tensor& meta,
              const Tensor& init_data, const Tensor& grad_output, const Tensor& ids,
              const Tensor& handles, const Tensor& offsets,
              const std::optional<Tensor>& per_sample_weights, const Tensor& updates,
              const std::vector<int64_t>& feature_tables, const std::vector<int64_t>& feature_dims,
              int64_t pooling) {
  const Call call(op, "weights", weights.empty() ? meta : weights[0]);
  const GroupRows rows = group_rows(call, weights, generations, meta, init_data);
  LookupCall lookup = lookup_call(call, rows, ids, handles, offsets, per_sample_weights,
                                  feature_tables, feature_dims, pooling);
  // Whatever may fail comes before UpdateCall, which is the first to change anything.
  const GradientSort sort(call, rows, &lookup, grad_output);
  const UpdateCall update(call, rows, Optimizer::kElementStates + Optimizer::kRowStates,
                          Optimizer::kElementStates, state, row_clock, hyper, updates,
                          "feature_tables", feature_tables);
  for (size_t s = 0; s < rows.slabs.size(); ++s) {
    if (lookup.slab_features[s].empty() || lookup.args.features.count == 0) continue;
    const UpdateArgs args = update.slab(call, rows, s);
    with_lanes(rows.slabs[s].dim, sort.aligned(s),
               LaunchRuns<Optimizer>{call, args, sort, lookup.args.features.count});
  }
}

template <class Optimizer>
void update(const char* op, const std::vector<Tensor>& weights,
            const std::vector<Tensor>& generations, const std::vector<Tensor>& state,
            const Tensor& row_clock, const Tensor& hyper, const Tensor& meta,
            const Tensor& init_data, const std::vector<Tensor>& handles,
            const std::vector<Tensor>& ids, const std::vector<Tensor>& tables,
            const std::vector<Tensor>& gradients, const Tensor& counts, const Tensor& updates,
            const std::vector<int64_t>& updated_tables) {
  const Call call(op, "weights", weights.empty() ? meta : weights[0]);
  const GroupRows rows = group_rows(call, weights, generations, meta, init_data);
  std::vector<ReducedRows> reduced =
      reduced_rows(call, rows, handles, ids, tables, gradients, counts);
  const UpdateCall update(call, rows, Optimizer::kElementStates + Optimizer::kRowStates,
                          Optimizer::kElementStates, state, row_clock, hyper, updates,
                          "updated_tables", updated_tables);
  for (size_t s = 0; s < reduced.size(); ++s) {
    ReducedRows& entries = reduced[s];
    entries.updated = update.updated();
    const UpdateArgs args = update.slab(call, rows, s);
    const bool aligned = is_aligned(entries.gradients) && is_aligned(rows.slabs[s].weights);
    with_lanes(rows.slabs[s].dim, aligned, LaunchEntries<Optimizer>{call, args, entries});
  }
}

}  // namespace dynemb::cuda

// The two ops of one optimizer, name##_update_ and name##_backward_, defined and registered.
#define DYNEMB_OPTIMIZER_OPS(name, Optimizer)                                                    \
  namespace dynemb::cuda {                                                                       \
  static void name##_update_(std::vector<Tensor> weights, std::vector<Tensor> generations,       \
                             std::vector<Tensor> state, Tensor row_clock, Tensor hyper,          \
                             Tensor meta, Tensor init_data, std::vector<Tensor> handles,         \
                             std::vector<Tensor> ids, std::vector<Tensor> tables,                \
                             std::vector<Tensor> gradients, Tensor counts, Tensor updates,       \
                             std::vector<int64_t> updated_tables) {                              \
    update<Optimizer>(#name "_update_", weights, generations, state, row_clock, hyper, meta,     \
                      init_data, handles, ids, tables, gradients, counts, updates,               \
                      updated_tables);                                                           \
  }                                                                                              \
  static void name##_backward_(std::vector<Tensor> weights, std::vector<Tensor> generations,     \
                               std::vector<Tensor> state, Tensor row_clock, Tensor hyper,        \
                               Tensor meta, Tensor init_data, Tensor grad_output, Tensor ids,    \
                               Tensor handles, Tensor offsets,                                   \
                               std::optional<Tensor> per_sample_weights, Tensor updates,         \
                               std::vector<int64_t> feature_tables,                              \
                               std::vector<int64_t> feature_dims, int64_t pooling) {             \
    backward<Optimizer>(#name "_backward_", weights, generations, state, row_clock, hyper, meta, \
                        init_data, grad_output, ids, handles, offsets, per_sample_weights,       \
                        updates, feature_tables, feature_dims, pooling);                         \
  }                                                                                              \
  }                                                                                              \
  DYNEMB_IMPLEMENT_OPS(m) {                                                                      \
    m.impl(#name "_update_", TORCH_BOX(&dynemb::cuda::name##_update_));                          \
    m.impl(#name "_backward_", TORCH_BOX(&dynemb::cuda::name##_backward_));                      \
  }
