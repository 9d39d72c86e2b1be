#include <iterator>
#include <optional>
#include <vector>

#include "core/policy/counts.h"
#include "cuda/memory/table_memory.h"
#include "cuda/optimizer/row_update.cuh"

namespace dynemb::cuda {
namespace {

enum UpdateHead : int { kHeadRefused = 0, kHeadRaises = 1, kHeadWords = 2 };

// One block: the step of every updated table, and the counts of updates. Changes nothing if the
// rows have been updated since the forward.
__global__ void begin_update(int64_t* clock, int64_t table_count, const double* hyper,
                             const int64_t* updates, const int64_t* updated, OptimizerStep* steps,
                             int64_t* head, ErrorSink errors) {
  int64_t* extra = clock + table_count;
  const bool fits = *updates == extra[kRowClockUpdates];
  __syncthreads();
  if (!fits) {
    if (threadIdx.x == 0) {
      head[kHeadRefused] = 1;
      head[kHeadRaises] = 0;
      errors.report(kErrorUpdated, *updates);
    }
    return;
  }
  bool raises = false;
  for (int64_t t = threadIdx.x; t < table_count; t += blockDim.x) {
    const int64_t now = updated[t] != 0 ? next_count(clock[t]) : clock[t];
    const OptimizerStep step = optimizer_step(hyper + t * kHyperColumns, now);
    steps[t] = step;
    if (step.skip || updated[t] == 0) continue;
    clock[t] = now;
    raises = raises || step.non_finite == NonFinite::kRaise;
  }
  const int any_raises = __syncthreads_or(raises);
  if (threadIdx.x == 0) {
    head[kHeadRefused] = 0;
    head[kHeadRaises] = any_raises;
    ++extra[kRowClockUpdates];
    ++extra[kRowClockSinceStep];
  }
}

// A group of lanes per run of a table that raises: bytes as in sum_run. Nothing if no table raises.
template <class Group>
__global__ void check_run_gradients(Group group, FiniteCheck check, GradientArgs gradients,
                                    GradientRuns runs) {
  if (*check.raises == 0) return;
  const FeatureArgs& features = gradients.lookup.features;
  const int64_t dim = check.slab.dim;
  const int64_t last = runs.slab_first[check.slab_number + 1];
  const int64_t stride = group.total();
  for (int64_t r = runs.slab_first[check.slab_number] + group.number(); r < last; r += stride) {
    const int64_t position = runs.positions[runs.begin[r]];
    const int64_t table = features.table_of(position);
    if (!check.raises_for(table)) continue;
    bool finite = true;
    for (int64_t first = 0; first < dim; first += group.chunk()) {
      const auto sum = run_chunk(group, gradients, runs, r, first, dim);
      finite = finite && all_finite(sum);
    }
    if (!finite) check.refuse(table);
  }
}

// A group of lanes per entry of a table that raises: 4 * dim bytes each.
template <class Group>
__global__ void check_entry_gradients(Group group, FiniteCheck check, ReducedRows entries) {
  if (*check.raises == 0) return;
  const int64_t dim = check.slab.dim;
  const int64_t count = *entries.count;
  if (count < 0 || count > entries.capacity) return;  // update_rows reports it
  const int64_t stride = group.total();
  for (int64_t e = group.number(); e < count; e += stride) {
    if (!entries.is_known(check.slab, check.slab_number, check.rows, e)) continue;
    const int64_t table = entries.tables[e];
    if (!check.raises_for(table)) continue;
    bool finite = true;
    for (int64_t first = 0; first < dim; first += group.chunk()) {
      finite = finite && all_finite(float_chunk(group, entries.gradients + e * dim, first, dim));
    }
    if (!finite) check.refuse(table);
  }
}

}  // namespace

UpdateCall::UpdateCall(const Call& call, const GroupRows& rows, int64_t optimizer,
                       const std::vector<Tensor>& weights, const std::vector<Tensor>& state,
                       const std::vector<Tensor>& dirty_bits,
                       const std::vector<Tensor>& copy_on_write, const Tensor& row_clock,
                       const Tensor& hyper, const Tensor& updates, const char* tables_argument,
                       const std::vector<int64_t>& updated_tables)
    : state_(slab_states(call, weights, state, dirty_bits, copy_on_write)) {
  const int64_t table_count = rows.table_count;
  const UpdateTensors given = update_tensors(call, optimizer, state_, table_count, row_clock, hyper,
                                             updates, tables_argument, updated_tables);
  clock_ = given.clock;
  extra_ = given.extra;
  updated_part_ = scratch_.add<int64_t>(table_count);
  step_part_ = scratch_.add<OptimizerStep>(table_count);
  head_part_ = scratch_.add<int64_t>(kHeadWords);
  scratch_.allocate(call);
  upload_words(call, given.updated, scratch_.get(updated_part_));
  call.launch(begin_update, 128, 128, clock_, table_count, given.hyper, given.seen,
              scratch_.get(updated_part_), scratch_.get(step_part_), scratch_.get(head_part_),
              error_sink(call));
}

FiniteCheck UpdateCall::finite_check(const Call& call, const GroupRows& rows, size_t s) const {
  int64_t* head = scratch_.get(head_part_);
  return {rows.slabs[s],
          static_cast<int64_t>(s),
          rows.args,
          scratch_.get(step_part_),
          scratch_.get(updated_part_),
          rows.table_count,
          head + kHeadRaises,
          head + kHeadRefused,
          clock_,
          error_sink(call)};
}

void UpdateCall::check_runs(const Call& call, const GroupRows& rows, size_t s,
                            const GradientSort& sort, int64_t most_runs) const {
  const FiniteCheck check = finite_check(call, rows, s);
  with_lanes(rows.slabs[s].dim, sort.aligned(s), [&](auto group) {
    call.launch_strided(check_run_gradients<decltype(group)>, most_runs * group.size(), group,
                        check, sort.args(), sort.runs());
  });
}

void UpdateCall::check_entries(const Call& call, const GroupRows& rows, size_t s,
                               const ReducedRows& entries) const {
  const FiniteCheck check = finite_check(call, rows, s);
  with_lanes(rows.slabs[s].dim, entries.aligned(rows.slabs[s]), [&](auto group) {
    call.launch_strided(check_entry_gradients<decltype(group)>, entries.capacity * group.size(),
                        group, check, entries);
  });
}

UpdateArgs UpdateCall::slab(const Call& call, const GroupRows& rows, size_t s) const {
  return {rows.slabs[s], static_cast<int64_t>(s),
          rows.args,     scratch_.get(step_part_),
          state_[s],     scratch_.get(head_part_) + kHeadRefused,
          extra_,        error_sink(call)};
}

std::vector<ReducedRows> reduced_rows(const Call& call, const GroupRows& rows,
                                      const std::vector<Tensor>& weights,
                                      const std::vector<Tensor>& handles,
                                      const std::vector<Tensor>& ids,
                                      const std::vector<Tensor>& tables,
                                      const std::vector<Tensor>& gradients, const Tensor& counts) {
  const std::vector<ReducedTensors> slabs =
      reduced_tensors(call, weights, handles, ids, tables, gradients, counts);
  note_applied(handles[0]);
  std::vector<ReducedRows> result;
  for (const ReducedTensors& slab : slabs) {
    result.push_back({slab.handles, slab.ids, slab.tables, slab.gradients, slab.count,
                      slab.capacity, nullptr, rows.table_count});
  }
  return result;
}

namespace {

LaunchUpdate launch_of(const char* op, int64_t optimizer) {
  check_optimizer(op, optimizer);
  constexpr LaunchUpdate (*kParts[])(int64_t) = {
      launch_of_part<0>, launch_of_part<1>, launch_of_part<2>, launch_of_part<3>,
      launch_of_part<4>, launch_of_part<5>, launch_of_part<6>};
  static_assert(std::size(kParts) == kOptimizerParts);
  return kParts[optimizer % kOptimizerParts](optimizer);
}

void embedding_backward_(std::vector<Tensor> weights, std::vector<Tensor> generations,
                         std::vector<Tensor> state, std::vector<Tensor> dirty_bits,
                         std::vector<Tensor> copy_on_write, Tensor row_clock, Tensor hyper,
                         Tensor meta, Tensor init_data, Tensor grad_output, Tensor ids,
                         Tensor handles, Tensor offsets, std::optional<Tensor> per_sample_weights,
                         Tensor updates, std::vector<int64_t> feature_tables,
                         std::vector<int64_t> feature_dims, int64_t pooling, int64_t optimizer) {
  const Call call("embedding_backward_", "weights", weights.empty() ? meta : weights[0]);
  const LaunchUpdate launch = launch_of(call.op, optimizer);
  const GroupRows rows = group_rows(call, weights, generations, meta, init_data);
  LookupCall lookup = lookup_call(call, rows, ids, handles, offsets, per_sample_weights,
                                  feature_tables, feature_dims, pooling);
  // Everything that may fail precedes UpdateCall, the first change.
  const GradientSort sort(call, rows, &lookup, grad_output);
  const UpdateCall update(call, rows, optimizer, weights, state, dirty_bits, copy_on_write,
                          row_clock, hyper, updates, "feature_tables", feature_tables);
  const int64_t count = lookup.args.features.count;
  const auto is_touched = [&](size_t s) { return !lookup.slab_features[s].empty() && count > 0; };
  for (size_t s = 0; s < rows.slabs.size(); ++s) {
    if (is_touched(s)) update.check_runs(call, rows, s, sort, count);
  }
  for (size_t s = 0; s < rows.slabs.size(); ++s) {
    if (!is_touched(s)) continue;
    const UpdateArgs args = update.slab(call, rows, s);
    launch(call, args, {sort.args(), sort.runs(), {}, false}, sort.aligned(s), count);
  }
}

void apply_grad_(std::vector<Tensor> weights, std::vector<Tensor> generations,
                 std::vector<Tensor> state, std::vector<Tensor> dirty_bits,
                 std::vector<Tensor> copy_on_write, Tensor row_clock, Tensor hyper, Tensor meta,
                 Tensor init_data, std::vector<Tensor> handles, std::vector<Tensor> ids,
                 std::vector<Tensor> tables, std::vector<Tensor> gradients, Tensor counts,
                 Tensor updates, std::vector<int64_t> updated_tables, int64_t optimizer) {
  const Call call("apply_grad_", "weights", weights.empty() ? meta : weights[0]);
  const LaunchUpdate launch = launch_of(call.op, optimizer);
  const GroupRows rows = group_rows(call, weights, generations, meta, init_data);
  std::vector<ReducedRows> reduced =
      reduced_rows(call, rows, weights, handles, ids, tables, gradients, counts);
  const UpdateCall update(call, rows, optimizer, weights, state, dirty_bits, copy_on_write,
                          row_clock, hyper, updates, "updated_tables", updated_tables);
  for (ReducedRows& entries : reduced) entries.updated = update.updated();
  for (size_t s = 0; s < reduced.size(); ++s) update.check_entries(call, rows, s, reduced[s]);
  for (size_t s = 0; s < reduced.size(); ++s) {
    const UpdateArgs args = update.slab(call, rows, s);
    launch(call, args, {{}, {}, reduced[s], true}, reduced[s].aligned(rows.slabs[s]),
           reduced[s].capacity);
  }
}

}  // namespace
}  // namespace dynemb::cuda

DYNEMB_IMPLEMENT_OPS(m) {
  m.impl("embedding_backward_", TORCH_BOX(&dynemb::cuda::embedding_backward_));
  m.impl("apply_grad_", TORCH_BOX(&dynemb::cuda::apply_grad_));
}
