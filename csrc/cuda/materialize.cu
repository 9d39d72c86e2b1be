// materialize_: writes the initial value of every row that its id has not trained yet.
#include <vector>

#include "cuda/rows_args.h"

namespace dynemb::cuda {
namespace {

// Pointers to the state tensors of a slab, on the device.
struct MaterializeJob {
  IndexArgs index;
  RowArgs rows;
  SlabRows slab;
  int64_t slab_number;
  const double* hyper;
  float* const* element_state;
  int64_t element_states;
  float* const* row_state;
  int64_t row_states;
  int64_t* written;
};

// A group of lanes per slot of every table of the slab. Reads the index in order; per occupied slot
// a random 4-byte generation; per row written, the row and its state.
template <int kWidth, int kLanes>
__global__ void write_unwritten(MaterializeJob job) {
  using Group = LaneGroup<kLanes>;
  const int lane = Group::lane();
  const int64_t dim = job.slab.dim;
  const int64_t stride = thread_total() / kLanes;
  for (int64_t t = 0; t < job.index.table_count; ++t) {
    if (job.index.meta_row(t)[kMetaSlab] != job.slab_number) continue;
    const TableView table = table_view(job.index, t);
    const TableInit init = table_init(job.rows, t);
    const float initial = static_cast<float>(job.hyper[t * kHyperColumns + kHyperInitialState]);
    const int64_t slots = table.bucket_count * kBucketWidth;
    for (int64_t i = thread_number() / kLanes; i < slots; i += stride) {
      const int64_t* line = table.line(i / kBucketWidth);
      const int64_t stored = line[kBucketWidth + i % kBucketWidth];
      if (stored == 0) continue;
      const int64_t handle = decode_handle(stored);
      const int64_t row = handle_row(handle);
      if (row >= job.slab.rows) continue;
      if (row_status(handle, job.slab.generations[row]) != RowStatus::kUnwritten) continue;
      const int64_t id = line[i % kBucketWidth];
      for (int64_t column = lane * kWidth; column < dim; column += kLanes * kWidth) {
        store_floats<kWidth>(
            job.slab.weights + row * dim + column,
            initial_floats<kWidth>(init, init.init_begin, init.init_count, id, column));
        Floats<kWidth> fresh;
#pragma unroll
        for (int k = 0; k < kWidth; ++k) fresh.value[k] = initial;
        for (int64_t k = 0; k < job.element_states; ++k) {
          store_floats<kWidth>(job.element_state[k] + row * dim + column, fresh);
        }
      }
      __syncwarp(Group::mask());  // all lanes have read the generation
      if (lane == 0) {
        for (int64_t k = 0; k < job.row_states; ++k) job.row_state[k][row] = initial;
        job.slab.generations[row] = handle_generation(handle);
        atomicAdd(reinterpret_cast<unsigned long long*>(job.written), 1ULL);
      }
    }
  }
}

struct LaunchMaterialize {
  const Call& call;
  const MaterializeJob& job;
  int64_t most_slots;

  template <int kWidth, int kLanes>
  void run() const {
    call.launch_strided(write_unwritten<kWidth, kLanes>, most_slots * kLanes, job);
  }
};

// Returns how many rows were written.
Tensor materialize_(std::vector<Tensor> weights, std::vector<Tensor> generations,
                    std::vector<Tensor> state, Tensor buckets, Tensor tables, Tensor hyper,
                    Tensor meta, Tensor init_data) {
  const Call call("materialize_", "buckets", buckets);
  const IndexArgs index = index_args(call, buckets, nullptr, tables, meta);
  const GroupRows rows = group_rows(call, weights, generations, meta, init_data);
  call.check("hyper", hyper, ScalarType::Double);
  check_size(call.op, "hyper", hyper, 0, index.table_count);
  check_size(call.op, "hyper", hyper, 1, kHyperColumns);
  const size_t slabs = weights.size();
  STD_TORCH_CHECK(state.size() % slabs == 0, "dynemb::materialize_: state has ", state.size(),
                  " tensors, expected a multiple of the ", slabs, " slabs");
  std::vector<std::vector<int64_t>> element_state(slabs), row_state(slabs);
  std::vector<bool> aligned(slabs, true);
  for (size_t i = 0; i < state.size(); ++i) {
    const size_t s = i % slabs;
    call.check("state", state[i], ScalarType::Float);
    check_size(call.op, "state", state[i], 0, weights[s].size(0));
    if (state[i].dim() == 2) check_size(call.op, "state", state[i], 1, weights[s].size(1));
    (state[i].dim() == 2 ? element_state : row_state)[s].push_back(
        static_cast<int64_t>(reinterpret_cast<uintptr_t>(state[i].data_ptr())));
    if (!is_aligned(state[i].data_ptr())) aligned[s] = false;
  }
  std::vector<int64_t> words;
  for (size_t s = 0; s < slabs; ++s) {
    words.insert(words.end(), element_state[s].begin(), element_state[s].end());
    words.insert(words.end(), row_state[s].begin(), row_state[s].end());
  }
  Scratch scratch;
  const auto part = scratch.add<int64_t>(static_cast<int64_t>(words.size()));
  scratch.allocate(call);
  upload_words(call, words, scratch.get(part));
  Tensor written = call.empty({1}, ScalarType::Long);
  call.fill(written.data_ptr(), 0, 8);
  const int64_t* at = scratch.get(part);
  for (size_t s = 0; s < slabs; ++s) {
    MaterializeJob job{index,
                       rows.args,
                       rows.slabs[s],
                       static_cast<int64_t>(s),
                       static_cast<const double*>(hyper.data_ptr()),
                       reinterpret_cast<float* const*>(at),
                       static_cast<int64_t>(element_state[s].size()),
                       reinterpret_cast<float* const*>(at + element_state[s].size()),
                       static_cast<int64_t>(row_state[s].size()),
                       static_cast<int64_t*>(written.data_ptr())};
    at += element_state[s].size() + row_state[s].size();
    with_lanes(rows.slabs[s].dim, aligned[s] && is_aligned(rows.slabs[s].weights),
               LaunchMaterialize{call, job, buckets.size(0) * kBucketWidth});
  }
  return written;
}

}  // namespace
}  // namespace dynemb::cuda

DYNEMB_IMPLEMENT_OPS(m) { m.impl("materialize_", TORCH_BOX(&dynemb::cuda::materialize_)); }
