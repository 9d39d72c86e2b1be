#include "cuda/row_update.cuh"

namespace dynemb::cuda {
namespace {

// One block: the step of every table that is updated, and the counts of updates. Changes nothing if
// the rows have been updated since the forward.
__global__ void begin_update(int64_t* clock, int64_t table_count, const double* hyper,
                             const int64_t* updates, const int64_t* updated, OptimizerStep* steps,
                             int64_t* refused, ErrorSink errors) {
  int64_t* extra = clock + table_count;
  const bool fits = *updates == extra[kRowClockUpdates];
  __syncthreads();
  if (!fits) {
    if (threadIdx.x == 0) {
      *refused = 1;
      errors.report(kErrorUpdated, *updates);
    }
    return;
  }
  for (int64_t t = threadIdx.x; t < table_count; t += blockDim.x) {
    clock[t] += updated[t];
    steps[t] = optimizer_step(hyper + t * kHyperColumns, clock[t]);
  }
  if (threadIdx.x == 0) {
    *refused = 0;
    ++extra[kRowClockUpdates];
    ++extra[kRowClockSinceStep];
  }
}

}  // namespace

UpdateCall::UpdateCall(const Call& call, const GroupRows& rows, int states, int element_states,
                       const std::vector<Tensor>& state, const Tensor& row_clock,
                       const Tensor& hyper, const Tensor& updates, const char* tables_argument,
                       const std::vector<int64_t>& updated_tables) {
  const size_t slabs = rows.slabs.size();
  STD_TORCH_CHECK(state.size() == static_cast<size_t>(states) * slabs, "dynemb::", call.op,
                  ": state has ", state.size(), " tensors, expected ", states, " for each of ",
                  slabs, " slabs");
  state_.resize(slabs);
  for (size_t s = 0; s < slabs; ++s) {
    for (int k = 0; k < states; ++k) {
      const Tensor& tensor = state[static_cast<size_t>(k) * slabs + s];
      const int64_t width = k < element_states ? rows.slabs[s].dim : 1;
      call.check("state", tensor, ScalarType::Float);
      check_size(call.op, "state", tensor, 0, rows.slabs[s].rows);
      STD_TORCH_CHECK(tensor.numel() == rows.slabs[s].rows * width, "dynemb::", call.op, ": state ",
                      k, " of slab ", s, " has ", tensor.numel(), " elements, expected ",
                      rows.slabs[s].rows * width);
      STD_TORCH_CHECK(is_aligned(tensor.data_ptr()), "dynemb::", call.op, ": state ", k,
                      " of slab ", s, " must begin at a multiple of 16 bytes: clone it");
      state_[s].push_back(static_cast<float*>(tensor.data_ptr()));
    }
  }
  const int64_t table_count = rows.table_count;
  call.check("row_clock", row_clock, ScalarType::Long);
  check_size(call.op, "row_clock", row_clock, 0, table_count + kRowClockExtra);
  call.check("hyper", hyper, ScalarType::Double);
  check_size(call.op, "hyper", hyper, 0, table_count);
  check_size(call.op, "hyper", hyper, 1, kHyperColumns);
  call.check("updates", updates, ScalarType::Long);
  check_size(call.op, "updates", updates, 0, 1);
  std::vector<int64_t> updated(static_cast<size_t>(table_count), 0);
  for (const int64_t t : updated_tables) {
    STD_TORCH_CHECK(t >= 0 && t < table_count, "dynemb::", call.op, ": ", tables_argument,
                    " has table ", t, ", expected 0 to ", table_count - 1);
    updated[static_cast<size_t>(t)] = 1;
  }
  auto* clock = static_cast<int64_t*>(row_clock.data_ptr());
  stale_ = clock + table_count + kRowClockStale;
  updated_part_ = scratch_.add<int64_t>(table_count);
  step_part_ = scratch_.add<OptimizerStep>(table_count);
  refused_part_ = scratch_.add<int64_t>(1);
  scratch_.allocate(call);
  upload_words(call, updated, scratch_.get(updated_part_));
  call.launch(begin_update, 128, 128, clock, table_count,
              static_cast<const double*>(hyper.data_ptr()),
              static_cast<const int64_t*>(updates.data_ptr()), scratch_.get(updated_part_),
              scratch_.get(step_part_), scratch_.get(refused_part_), error_sink(call));
}

UpdateArgs UpdateCall::slab(const Call& call, const GroupRows& rows, size_t s) const {
  UpdateArgs args{
      rows.slabs[s],      static_cast<int64_t>(s),     rows.args, scratch_.get(step_part_),
      {nullptr, nullptr}, scratch_.get(refused_part_), stale_,    error_sink(call)};
  for (size_t k = 0; k < state_[s].size(); ++k) args.state[k] = state_[s][k];
  return args;
}

std::vector<ReducedRows> reduced_rows(const Call& call, const GroupRows& rows,
                                      const std::vector<Tensor>& handles,
                                      const std::vector<Tensor>& ids,
                                      const std::vector<Tensor>& tables,
                                      const std::vector<Tensor>& gradients, const Tensor& counts) {
  const size_t slabs = rows.slabs.size();
  STD_TORCH_CHECK(handles.size() == slabs && ids.size() == slabs && tables.size() == slabs &&
                      gradients.size() == slabs,
                  "dynemb::", call.op, ": handles, ids, tables and gradients must have one tensor ",
                  "for each of ", slabs, " slabs");
  call.check("counts", counts, ScalarType::Long);
  check_size(call.op, "counts", counts, 0, static_cast<int64_t>(slabs));
  std::vector<ReducedRows> result;
  for (size_t s = 0; s < slabs; ++s) {
    call.check("handles", handles[s], ScalarType::Long);
    call.check("ids", ids[s], ScalarType::Long);
    call.check("tables", tables[s], ScalarType::Long);
    call.check("gradients", gradients[s], ScalarType::Float);
    const int64_t capacity = handles[s].numel();
    check_size(call.op, "handles", handles[s], 0, capacity);
    check_size(call.op, "ids", ids[s], 0, capacity);
    check_size(call.op, "tables", tables[s], 0, capacity);
    check_size(call.op, "gradients", gradients[s], 0, capacity);
    check_size(call.op, "gradients", gradients[s], 1, rows.slabs[s].dim);
    result.push_back({static_cast<const int64_t*>(handles[s].data_ptr()),
                      static_cast<const int64_t*>(ids[s].data_ptr()),
                      static_cast<const int64_t*>(tables[s].data_ptr()),
                      static_cast<const float*>(gradients[s].data_ptr()),
                      static_cast<const int64_t*>(counts.data_ptr()) + s, capacity, nullptr,
                      rows.table_count});
  }
  return result;
}

}  // namespace dynemb::cuda
