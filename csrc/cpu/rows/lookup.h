// Rows of ids for lookups without a gradient.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "arguments/tensors.h"
#include "cpu/rows/args.h"

namespace dynemb::cpu {

// Implements embedding_inference; features without pooling have one dim. `formats`: of the slabs
// (core/rows/quantized.h); empty: rows of floats.
Tensor read_rows(const char* op, const std::vector<Tensor>& weights,
                 const std::vector<Tensor>& generations, const Tensor& meta,
                 const Tensor& init_data, const Tensor& ids, const Tensor& handles,
                 const Tensor& offsets, const std::optional<Tensor>& per_sample_weights,
                 const std::vector<int64_t>& feature_tables,
                 const std::vector<int64_t>& feature_dims, int64_t pooling,
                 const std::vector<int64_t>& formats = {});

// The rows or bags of a lookup.
Tensor run_lookup(const LookupArgs& lookup, const std::vector<TableRows>& tables);

// The last result of training lookups: the number of updates of the rows, by which the backward
// detects updates since the forward.
Tensor update_count(const char* op, const Tensor& row_clock, const Tensor& meta);

}  // namespace dynemb::cpu
