// Checked arguments: the rows of a group and their optimizer state, as pointers into memory of
// their device.
#pragma once

#include <cstdint>
#include <vector>

#include "arguments/tensors.h"
#include "core/rows/slab_state.h"

namespace dynemb {

// The storage of a tensor of rows or state; raises unless it is float32, bfloat16 or float16.
Storage storage_of(const CallContext& call, const char* name, const Tensor& tensor);

// The rows of one dim and dtype.
struct SlabTensors {
  char* weights;         // [rows, dim]
  int32_t* generations;  // [rows]; nullptr: handles are never stale
  int64_t rows;
  int64_t dim;
  Storage storage;    // of the weights; uint8 [rows, bytes] where they are quantized
  int64_t row_bytes;  // of the weights
};

struct RowTensors {
  std::vector<SlabTensors> slabs;
  const int64_t* meta;  // [table_count, kMetaColumns]
  int64_t table_count;
  const double* init_data;
  int64_t init_numel;
};
// `formats`: the slabs with quantized rows, uint8 [rows, bytes] (core/rows/quantized.h); empty:
// none.
RowTensors row_tensors(const CallContext& call, const std::vector<Tensor>& weights,
                       const std::vector<Tensor>& generations, const Tensor& meta,
                       const Tensor& init_data, const std::vector<int64_t>& formats = {});
// The same for frozen tables, which have only rows of ids.
RowTensors frozen_row_tensors(const CallContext& call, const std::vector<Tensor>& weights,
                              const Tensor& meta, const Tensor& init_data,
                              const std::vector<int64_t>& formats);

// By slab. `state`: tensor k of slab s at k * slabs + s. Two dimensions: a value per weight, or, as
// uint8, a row of 8-bit floats (core/rows/storage.h). float32 [rows]: a value per row; int32
// [rows]: steps. `dirty_bits` and `copy_on_write`: none, or one for each slab.
std::vector<SlabState> state_tensors(const CallContext& call, const std::vector<Tensor>& weights,
                                     const std::vector<Tensor>& state,
                                     const std::vector<Tensor>& dirty_bits = {},
                                     const std::vector<Tensor>& copy_on_write = {});

// The hyper-parameters of tables [table_count, kHyperColumns].
const double* hyper_tensor(const CallContext& call, const Tensor& hyper, int64_t table_count);

}  // namespace dynemb
