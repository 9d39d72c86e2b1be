// The kernels that apply an optimizer to rows. Each part_<n>.cu compiles those of some optimizers.
#pragma once

#include <type_traits>
#include <vector>

#include "arguments/update.h"
#include "core/optimizer/step.h"
#include "core/optimizers.h"
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

// Whether no row of a slab needs more than one chunk of float32 and no step of its own: then most
// updates take few registers.
template <class Optimizer, class Group>
bool has_plain_rows(const Group& group, const UpdateArgs& args) {
  bool plain = args.slab.storage == Storage::kFloat32 && args.state.steps == nullptr &&
               args.slab.dim <= (int64_t{1} << group.size_log2()) * Group::kValues;
  for (int k = 0; k < Optimizer::kElementStates; ++k) {
    plain = plain && args.state.storage[k] == Storage::kFloat32;
  }
  return plain;
}

// Weights of a chunk of a row: stored, or initial if the row has not been written yet.
template <class Group>
__device__ __forceinline__ auto row_weights(const Group& group, const UpdateArgs& args,
                                            int64_t table, bool unwritten, int64_t row, int64_t id,
                                            int64_t first) {
  constexpr int kWidth = Group::kWidth;
  const SlabRows& slab = args.slab;
  if (!unwritten) return load_chunk(group, slab.storage, slab.row(row), first, slab.dim);
  const TableInit init = table_init(args.rows, table);
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
template <class Optimizer, bool kPlain, int kState = 0, class Group, class States>
__device__ __forceinline__ void load_states(const Group& group, const SlabState& slab,
                                            const OptimizerStep& step, bool unwritten, int64_t row,
                                            int64_t first, int64_t dim, States& state) {
  if constexpr (kState < Optimizer::kElementStates) {
    const Storage storage = kPlain ? Storage::kFloat32 : slab.storage[kState];
    if (unwritten) {
      const float fresh = kState == 0 ? rounded(storage, step.initial_state) : 0.0f;
#pragma unroll
      for (int j = 0; j < Group::kValues; ++j) state[kState].value[j] = fresh;
    } else {
      state[kState] = load_state<kUnsignedState<Optimizer, kState>>(
          group, storage, slab.element[kState] + row * slab.row_bytes[kState], first, dim);
    }
    load_states<Optimizer, kPlain, kState + 1>(group, slab, step, unwritten, row, first, dim,
                                               state);
  }
}
// All lanes of the group must call it.
template <class Optimizer, bool kPlain, int kState = 0, class Group, class States>
__device__ __forceinline__ void store_states(const Group& group, const SlabState& slab,
                                             const Rounding& rounding, int64_t row, int64_t first,
                                             int64_t dim, const States& state) {
  if constexpr (kState < Optimizer::kElementStates) {
    store_state<kUnsignedState<Optimizer, kState>>(
        group, kPlain ? Storage::kFloat32 : slab.storage[kState], rounding, 1 + kState,
        slab.element[kState] + row * slab.row_bytes[kState], first, dim, state[kState]);
    store_states<Optimizer, kPlain, kState + 1>(group, slab, rounding, row, first, dim, state);
  }
}

// Asks for the memory of a row that has been written.
template <class Optimizer>
__device__ __forceinline__ void prefetch_row(const UpdateArgs& args, int64_t row) {
  prefetch(args.slab.row(row), args.slab.row_bytes);
#pragma unroll
  for (int k = 0; k < Optimizer::kElementStates; ++k) {
    const int64_t bytes = args.state.row_bytes[k];
    prefetch(args.state.element[k] + row * bytes, bytes);
  }
#pragma unroll
  for (int k = 0; k < Optimizer::kRowStates; ++k) prefetch(args.state.of_row[k] + row, 4);
}

// Passes over the columns of a row. Each needs results of the preceding one for the whole row.
enum RowPass : int {
  kMeasurePass,  // the gradient's norm, NaN and infinity
  kSumPass,      // the optimizer's sums
  kWritePass
};

// Applies the optimizer to one row by a group of lanes. `gradient(first)` gives the reduced
// gradient in a lane's columns of a chunk; all lanes call it. Reads and writes the row and each
// state tensor once (a row wider than a chunk is read in every pass). kPlain: see
// has_plain_rows and is_plain.
template <class Optimizer, bool kPlain, class Group, class Gradient>
__device__ __forceinline__ void update_row(const Group& group, const UpdateArgs& args,
                                           int64_t handle, RowStatus status, int64_t id,
                                           int64_t table, const Gradient& gradient) {
  constexpr int kValues = Group::kValues;
  constexpr int kStates = Optimizer::kElementStates;
  constexpr int kSums = Optimizer::kSums;
  const int lane = group.lane();
  const int64_t row = handle_row(handle);
  const int64_t dim = args.slab.dim;
  const SlabState& slab = args.state;
  const bool unwritten = !kPlain && status == RowStatus::kUnwritten;
  // a copy where the row's own steps change it
  constexpr bool kChanges = !kPlain && Optimizer::kRowSteps != RowSteps::kNone;
  std::conditional_t<kChanges, OptimizerStep, const OptimizerStep&> step = args.steps[table];
  if (!kPlain && step.skip && !step.measures) return;
  const int64_t seed = args.rows.meta[table * kMetaColumns + kMetaSeed];
  const Rounding rounding{step.stochastic, seed, id, step.step};
  int32_t row_steps = 0;
  if constexpr (kChanges) {
    if (slab.steps != nullptr) {
      const int32_t before = unwritten ? 0 : slab.steps[row];
      if constexpr (Optimizer::kRowSteps == RowSteps::kOptional) {
        row_steps = row_step(int64_t{before} + 1);
        correct_bias(step, row_steps);
      } else {
        row_steps = row_step(step.step);
        Optimizer::since(step, before);
      }
    }
  }
  float row_state[Optimizer::kRowStates + 1] = {};
#pragma unroll
  for (int k = 0; k < Optimizer::kRowStates; ++k) {
    const float fresh = k == 0 && kStates == 0 ? step.initial_state : 0.0f;
    row_state[k] = unwritten ? fresh : slab.of_row[k][row];
  }
  const bool whole = kPlain || dim <= group.chunk();  // stays in registers from pass to pass
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
  for (int pass = !kPlain && step.measures ? kMeasurePass : (kSums > 0 ? kSumPass : kWritePass);
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
          w = kPlain ? load_chunk(group, Storage::kFloat32, args.slab.row(row), first, dim)
                     : row_weights(group, args, table, unwritten, row, id, first);
          load_states<Optimizer, kPlain>(group, slab, step, unwritten, row, first, dim, state);
        }
        if (pass == kMeasurePass) finite = finite && all_finite<kValues>(g);
        if (!kPlain && step.scales) {
#pragma unroll
          for (int j = 0; j < kValues; ++j) g.value[j] = scaled_gradient(step, g.value[j]);
        }
      }
      if (!kPlain && pass == kMeasurePass) {
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
      store_chunk(group, kPlain ? Storage::kFloat32 : args.slab.storage, rounding, 0,
                  args.slab.row(row), first, dim, w);
      store_states<Optimizer, kPlain>(group, slab, rounding, row, first, dim, state);
    }
    if (!kPlain && pass == kMeasurePass) {
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
  if constexpr (kChanges) {
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

constexpr int kUpdateBlock = 256;  // threads, at most: the registers of two blocks fit
constexpr int kUpdated = 8;        // rows that a group of lanes takes, at most one of each lane

// What a lane has found out about a row to be updated.
struct UpdatedRow {
  int64_t handle = -1;  // -1: nothing is updated
  int64_t id = 0;
  int table = 0;
  uint32_t number = 0;  // of its run or entry
  int status = 0;       // RowStatus
};

// Rows that a plain update leaves out: unwritten ones, and those with a scaled or measured
// gradient.
struct OtherRows {
  int64_t* count = nullptr;  // nullptr: all rows
  uint32_t* numbers = nullptr;

  __device__ __forceinline__ void add(uint32_t number) const {
    numbers[atomicAdd(reinterpret_cast<unsigned long long*>(count), 1ULL)] = number;
  }
};

__device__ __forceinline__ bool is_plain(RowStatus status, const OptimizerStep& step) {
  return status == RowStatus::kLive && !step.measures && !step.scales && !step.skip;
}

// The row of a run or entry r.
__device__ __forceinline__ UpdatedRow find_updated(const UpdateArgs& args,
                                                   const UpdateGradients& from, int64_t r) {
  const FeatureArgs& features = from.gradients.lookup.features;
  UpdatedRow row;
  row.number = static_cast<uint32_t>(r);
  if (from.reduced) {
    const ReducedRows& entries = from.entries;
    row.handle = entries.handles[r];
    row.id = entries.ids[r];
    row.table = static_cast<int>(entries.tables[r]);
    const bool known = entries.is_known(args.slab, args.slab_number, args.rows, r);
    if (!known || entries.updated[row.table] == 0) {
      args.errors.report(known ? kErrorTableUpdated : kErrorEntry, r);
      row.handle = -1;
      return row;
    }
    prefetch(entries.gradients + r * args.slab.dim, 4 * args.slab.dim);
  } else {
    const int64_t position = from.runs.positions[from.runs.begin[r]];
    row.handle = from.gradients.lookup.handles[position];
    row.id = features.ids[position];
    row.table = static_cast<int>(features.table_of(position));
    prefetch(from.gradients.gradient + occurrence(from.gradients, position).offset,
             4 * args.slab.dim);
  }
  return row;
}

// A group of lanes per kUpdated rows: each lane looks at one and asks for its memory, then all
// lanes update them one after another. Runs: 4 * dim bytes an occurrence, at random; entries: 4 *
// dim bytes in order. kPlain: plain rows of a slab that has_plain_rows, while the others are noted,
// for a second launch. One kernel for runs and entries, and for all small dims: each optimizer has
// one, and they dominate the library's compile time and size.
template <class Optimizer, bool kPlain, class Group>
__global__ void __launch_bounds__(kUpdateBlock, kPlain ? 3 : 2)
    update_rows(Group group, UpdateArgs args, UpdateGradients from, OtherRows others) {
  if (*args.refused != 0) return;
  int64_t first = 0;
  int64_t last;
  if (from.reduced) {
    last = *from.entries.count;
    if (last < 0 || last > from.entries.capacity) {
      if (thread_number() == 0) args.errors.report(kErrorCount, args.slab_number);
      return;
    }
  } else {
    first = from.runs.slab_first[args.slab_number];
    last = from.runs.slab_first[args.slab_number + 1];
  }
  const bool of_others = !kPlain && others.count != nullptr;
  if (of_others) {
    first = 0;
    last = *others.count;
  }
  // few rows are shared by all groups
  const int64_t share = (last - first + group.total() - 1) / group.total();
  const int64_t most = min(share, static_cast<int64_t>(min(group.size(), kUpdated)));
  const int64_t stride = group.total() * most;
  for (int64_t begin = first + group.number() * most; begin < last; begin += stride) {
    const auto count = static_cast<int>(min(most, last - begin));
    UpdatedRow own;
    if (group.lane() < count) {
      const int64_t at = begin + group.lane();
      own = find_updated(args, from, of_others ? others.numbers[at] : at);
      if (own.handle >= 0) {
        const int64_t row = handle_row(own.handle);
        const RowStatus status = row_status(own.handle, args.slab.generations[row]);
        own.status = static_cast<int>(status);
        if (status == RowStatus::kStale) {
          args.count(kRowClockStale);
          own.handle = -1;
        } else if (kPlain && !is_plain(status, args.steps[own.table])) {
          others.add(own.number);
          own.handle = -1;
        } else if (status == RowStatus::kLive) {
          prefetch_row<Optimizer>(args, row);
        }
      }
    }
#pragma unroll 1
    for (int j = 0; j < count; ++j) {
      const int64_t handle = group.broadcast(static_cast<long long>(own.handle), j);
      const int64_t id = kPlain ? 0 : group.broadcast(static_cast<long long>(own.id), j);
      const int64_t table = group.broadcast(own.table, j);
      const int64_t r = group.broadcast(own.number, j);
      const auto status = static_cast<RowStatus>(group.broadcast(own.status, j));
      if (handle < 0) continue;
      update_row<Optimizer, kPlain>(group, args, handle, status, id, table, [&](int64_t column) {
        const int64_t dim = args.slab.dim;
        return from.reduced ? float_chunk(group, from.entries.gradients + r * dim, column, dim)
                            : run_chunk(group, from.gradients, from.runs, r, column, dim);
      });
    }
  }
}

// The row tensors of an update, checked against the optimizer, and its scalars on the device.
class UpdateCall {
 public:
  UpdateCall(const Call& call, const GroupRows& rows, int64_t optimizer,
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

using LaunchUpdate = void (*)(const Call& call, const UpdateArgs& args, const UpdateGradients& from,
                              bool aligned, int64_t most_rows);

template <class Optimizer>
void launch_update(const Call& call, const UpdateArgs& args, const UpdateGradients& from,
                   bool aligned, int64_t most_rows) {
  with_lanes(args.slab.dim, aligned, [&](auto group) {
    using Group = decltype(group);
    const int64_t threads = most_rows * group.size();
    OtherRows others;
    Scratch scratch;
    if constexpr (Group::kWidth == 4) {  // the others are odd
      if (has_plain_rows<Optimizer>(group, args)) {
        const auto count_part = scratch.add<int64_t>(1);
        const auto number_part = scratch.add<uint32_t>(most_rows);
        scratch.allocate(call);
        others = {scratch.get(count_part), scratch.get(number_part)};
        call.fill(others.count, 0, 8);
        call.launch_strided(update_rows<Optimizer, true, Group>, threads, group, args, from,
                            others);
      }
    }
    call.launch_strided(update_rows<Optimizer, false, Group>, threads, group, args, from, others);
  });
}

constexpr int kOptimizerParts = 7;  // sources part_<n>.cu

// The launch of an optimizer of a part.
template <int kPart>
LaunchUpdate launch_of_part(int64_t optimizer);

}  // namespace dynemb::cuda
