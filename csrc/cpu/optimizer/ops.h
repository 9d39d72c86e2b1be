// <name>_update_ and <name>_backward_ of the optimizers. Each part_<n>.cpp compiles some of them.
#pragma once

#include <torch/csrc/stable/library.h>

#include "core/optimizers.h"
#include "cpu/optimizer/row_update.h"
#include "cpu/optimizer/update.h"

namespace dynemb::cpu {

constexpr int kOptimizerParts = 4;  // sources part_<n>.cpp

template <class Ops>
void update_(std::vector<Tensor> weights, std::vector<Tensor> generations,
             std::vector<Tensor> state, std::vector<Tensor> dirty_bits,
             std::vector<Tensor> copy_on_write, Tensor row_clock, Tensor hyper, Tensor meta,
             Tensor init_data, std::vector<Tensor> handles, std::vector<Tensor> ids,
             std::vector<Tensor> tables, std::vector<Tensor> gradients, Tensor counts,
             Tensor updates, std::vector<int64_t> updated_tables) {
  update(kOptimizerKernels<typename Ops::Optimizer>, Ops::kUpdate, weights, generations, state,
         dirty_bits, copy_on_write, row_clock, hyper, meta, init_data, handles, ids, tables,
         gradients, counts, updates, updated_tables);
}

template <class Ops>
void backward_(std::vector<Tensor> weights, std::vector<Tensor> generations,
               std::vector<Tensor> state, std::vector<Tensor> dirty_bits,
               std::vector<Tensor> copy_on_write, Tensor row_clock, Tensor hyper, Tensor meta,
               Tensor init_data, Tensor grad_output, Tensor ids, Tensor handles, Tensor offsets,
               std::optional<Tensor> per_sample_weights, Tensor updates,
               std::vector<int64_t> feature_tables, std::vector<int64_t> feature_dims,
               int64_t pooling) {
  backward(kOptimizerKernels<typename Ops::Optimizer>, Ops::kBackward, weights, generations, state,
           dirty_bits, copy_on_write, row_clock, hyper, meta, init_data, grad_output, ids, handles,
           offsets, per_sample_weights, updates, feature_tables, feature_dims, pooling);
}

template <int kPart, class Library>
void implement_optimizers(Library& library) {
  for_optimizers_of_part<kPart, kOptimizerParts>([&](auto ops) {
    using Ops = decltype(ops);
    library.impl(Ops::kUpdate, TORCH_BOX(&update_<Ops>));
    library.impl(Ops::kBackward, TORCH_BOX(&backward_<Ops>));
  });
}

}  // namespace dynemb::cpu
