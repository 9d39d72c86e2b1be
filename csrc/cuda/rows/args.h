// Host side of the row ops: checked tensors as kernel arguments.
#pragma once

#include <optional>
#include <vector>

#include "arguments/lookup.h"
#include "arguments/rows.h"
#include "cuda/index/args.h"
#include "cuda/rows/tensors.cuh"

namespace dynemb::cuda {

// The row tensors of a group.
struct GroupRows {
  std::vector<SlabRows> slabs;
  RowArgs args;
  int64_t table_count;
};

// As state_tensors. Also raises if kernels could not load 16 bytes at a time.
std::vector<SlabState> slab_states(const Call& call, const std::vector<Tensor>& weights,
                                   const std::vector<Tensor>& state,
                                   const std::vector<Tensor>& dirty_bits,
                                   const std::vector<Tensor>& copy_on_write);

GroupRows group_rows(const RowTensors& given);
inline GroupRows group_rows(const Call& call, const std::vector<Tensor>& weights,
                            const std::vector<Tensor>& generations, const Tensor& meta,
                            const Tensor& init_data) {
  return group_rows(row_tensors(call, weights, generations, meta, init_data));
}

// Host data of a lookup. Small arrays for kernels are words to upload.
struct LookupCall {
  LookupArgs args;
  std::vector<int64_t> feature_slab;
  std::vector<std::vector<int64_t>> slab_features;  // by slab
  std::vector<bool> slab_aligned;                   // rows of output or gradient: 16-byte accesses
  std::vector<int64_t> words;
  int64_t output_rows;  // batch, or the number of ids without pooling
  int64_t output_columns;
};
LookupCall lookup_call(const Call& call, const GroupRows& rows, const Tensor& ids,
                       const Tensor& handles, const Tensor& offsets,
                       const std::optional<Tensor>& per_sample_weights,
                       const std::vector<int64_t>& feature_tables,
                       const std::vector<int64_t>& feature_dims, int64_t pooling);

// Positions of a lookup's words on the device, after the upload.
struct LookupWords {
  std::vector<const int64_t*> slab_features;
};
LookupWords upload_lookup(const Call& call, LookupCall* lookup, int64_t* to);

// Chooses the groups of lanes for rows of `dim` floats and calls launch(group). `aligned`: 16-byte
// accesses are possible.
template <class F>
void with_lanes(int64_t dim, bool aligned, const F& launch) {
  if (aligned && dim % 4 == 0) {
    if (dim > 64) return launch(LaneGroup<4, 32>{5});
    int log2 = 1;
    while (int64_t{4} << log2 < dim) ++log2;
    return launch(LaneGroup<4, 16>{log2});
  }
  if (dim <= 8) return launch(LaneGroup<1, 16>{3});
  return launch(LaneGroup<1, 32>{5});
}

inline bool is_aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

}  // namespace dynemb::cuda
