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

UpdateCall::UpdateCall(const Call& call, const GroupRows& rows, const StateKinds& kinds,
                       const std::vector<Tensor>& weights, const std::vector<Tensor>& state,
                       const std::vector<Tensor>& dirty_bits,
                       const std::vector<Tensor>& copy_on_write, const Tensor& row_clock,
                       const Tensor& hyper, const Tensor& updates, const char* tables_argument,
                       const std::vector<int64_t>& updated_tables)
    : state_(slab_states(call, weights, state, dirty_bits, copy_on_write)) {
  const int64_t table_count = rows.table_count;
  const UpdateTensors given = update_tensors(call, kinds, state_, table_count, row_clock, hyper,
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

}  // namespace dynemb::cuda
