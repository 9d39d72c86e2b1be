// Shared parts of <name>_update_ and <name>_backward_ of all optimizers.
#pragma once

#include <optional>
#include <vector>

#include "cpu/optimizer/kernels.h"

namespace dynemb::cpu {

// Applies reduced gradients to rows.
void update(const OptimizerKernels& kernels, const char* op, const std::vector<Tensor>& weights,
            const std::vector<Tensor>& generations, const std::vector<Tensor>& state,
            const std::vector<Tensor>& dirty_bits, const std::vector<Tensor>& copy_on_write,
            const Tensor& row_clock, const Tensor& hyper, const Tensor& meta,
            const Tensor& init_data, const std::vector<Tensor>& handles,
            const std::vector<Tensor>& ids, const std::vector<Tensor>& tables,
            const std::vector<Tensor>& gradients, const Tensor& counts, const Tensor& updates,
            const std::vector<int64_t>& updated_tables);

// Reduces the output gradient of a lookup and applies it in the same pass, without writing the
// reduced gradients.
void backward(const OptimizerKernels& kernels, const char* op, const std::vector<Tensor>& weights,
              const std::vector<Tensor>& generations, const std::vector<Tensor>& state,
              const std::vector<Tensor>& dirty_bits, const std::vector<Tensor>& copy_on_write,
              const Tensor& row_clock, const Tensor& hyper, const Tensor& meta,
              const Tensor& init_data, const Tensor& grad_output, const Tensor& ids,
              const Tensor& handles, const Tensor& offsets,
              const std::optional<Tensor>& per_sample_weights, const Tensor& updates,
              const std::vector<int64_t>& feature_tables, const std::vector<int64_t>& feature_dims,
              int64_t pooling);

}  // namespace dynemb::cpu
