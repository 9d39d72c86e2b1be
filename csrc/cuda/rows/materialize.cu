// materialize_: writes the initial values of rows that have not been trained yet.
#include <vector>

#include "cuda/rows/args.h"

namespace dynemb::cuda {
namespace {

struct MaterializeJob {
  IndexArgs index;
  RowArgs rows;
  SlabRows slab;
  int64_t slab_number;
  const double* hyper;
  SlabState state;
  int64_t* written;
};

// State `k` of a row that was never updated.
template <class Group>
__device__ __forceinline__ void write_fresh(const Group& group, const SlabState& state, int k,
                                            int64_t row, int64_t dim, float initial) {
  constexpr int kWidth = Group::kWidth;
  const int lane = group.lane();
  char* to = state.element[k] + row * state.row_bytes[k];
  if (state.storage[k] == Storage::kBlockFloat8) {
    for (int64_t byte = lane * 4; byte < state.row_bytes[k]; byte += group.size() * 4) {
      *reinterpret_cast<uint32_t*>(to + byte) = 0;
    }
    return;
  }
  Floats<kWidth> fresh;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) fresh.value[i] = k == 0 ? initial : 0.0f;
  for (int64_t column = group.column(0); column < dim; column += group.stride()) {
    store_rounded<kWidth>(state.storage[k], Rounding{}, 0, to, column, fresh);
  }
}

// A group of lanes per slot of every table of the slab. Reads the index in order; per occupied slot
// a random 4-byte generation; per row written, the row and its state.
template <class Group>
__global__ void write_unwritten(Group group, MaterializeJob job) {
  constexpr int kWidth = Group::kWidth;
  const int lane = group.lane();
  const int64_t dim = job.slab.dim;
  const int64_t stride = group.total();
  for (int64_t t = 0; t < job.index.table_count; ++t) {
    if (job.index.meta_row(t)[kMetaSlab] != job.slab_number) continue;
    if (job.index.meta_row(t)[kMetaTiered] != 0) continue;  // unwritten rows stay unwritten
    const TableView table = table_view(job.index, t);
    const TableInit init = table_init(job.rows, t);
    const float initial = static_cast<float>(job.hyper[t * kHyperColumns + kHyperInitialState]);
    const int64_t slots = table.bucket_count * kBucketWidth;
    for (int64_t i = group.number(); i < slots; i += stride) {
      const int64_t* line = table.line(i / kBucketWidth);
      const int64_t stored = line[kBucketWidth + i % kBucketWidth];
      if (stored == 0) continue;
      const int64_t handle = decode_handle(stored);
      const int64_t row = handle_row(handle);
      if (row < 0 || row >= job.slab.rows) continue;  // lookups raise for it
      if (row_status(handle, job.slab.generations[row]) != RowStatus::kUnwritten) continue;
      const int64_t id = line[i % kBucketWidth];
      for (int64_t column = group.column(0); column < dim; column += group.stride()) {
        store_rounded<kWidth>(job.slab.storage, Rounding{}, 0, job.slab.row(row), column,
                              initial_floats<kWidth>(job.slab.storage, init, init.init_begin,
                                                     init.init_count, id, column));
      }
      const SlabState& state = job.state;
#pragma unroll
      for (int k = 0; k < kMaxStates; ++k) {
        if (k < state.element_states) write_fresh(group, state, k, row, dim, initial);
      }
      __syncwarp(group.mask());  // all lanes have read the generation
      if (lane == 0) {
#pragma unroll
        for (int k = 0; k < kMaxStates; ++k) {
          if (k >= state.row_states) continue;
          state.of_row[k][row] = k == 0 && state.element_states == 0 ? initial : 0.0f;
        }
        if (state.steps != nullptr) state.steps[row] = 0;
        if (state.dirty_bits != nullptr) state.dirty_bits[row] = kDirtyForAll;
        job.slab.generations[row] = handle_generation(handle);
        atomicAdd(reinterpret_cast<unsigned long long*>(job.written), 1ULL);
      }
    }
  }
}

// Returns the number of rows written.
Tensor materialize_(std::vector<Tensor> weights, std::vector<Tensor> generations,
                    std::vector<Tensor> state, std::vector<Tensor> dirty_bits,
                    std::vector<Tensor> copy_on_write, Tensor buckets, Tensor tables, Tensor hyper,
                    Tensor meta, Tensor init_data) {
  const Call call("materialize_", "buckets", buckets);
  const IndexArgs index = index_args(call, buckets, nullptr, tables, meta);
  const GroupRows rows = group_rows(call, weights, generations, meta, init_data);
  const double* numbers = hyper_tensor(call, hyper, index.table_count);
  const std::vector<SlabState> states =
      slab_states(call, weights, state, dirty_bits, copy_on_write);
  Tensor written = call.empty({1}, ScalarType::Long);
  call.fill(written.data_ptr(), 0, 8);
  const int64_t slots = buckets.size(0) * kBucketWidth;
  for (size_t s = 0; s < weights.size(); ++s) {
    const MaterializeJob job{index,
                             rows.args,
                             rows.slabs[s],
                             static_cast<int64_t>(s),
                             numbers,
                             states[s],
                             static_cast<int64_t*>(written.data_ptr())};
    with_lanes(rows.slabs[s].dim, is_aligned(rows.slabs[s].weights), [&](auto group) {
      call.launch_strided(write_unwritten<decltype(group)>, slots * group.size(), group, job);
    });
  }
  return written;
}

}  // namespace
}  // namespace dynemb::cuda

DYNEMB_IMPLEMENT_OPS(m) { m.impl("materialize_", TORCH_BOX(&dynemb::cuda::materialize_)); }
