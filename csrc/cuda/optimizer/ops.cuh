// <name>_update_ and <name>_backward_ of the optimizers. Each part_<n>.cu compiles some of them.
#pragma once

#include <optional>
#include <vector>

#include "core/optimizers.h"
#include "cuda/optimizer/row_update.cuh"

namespace dynemb::cuda {

constexpr int kOptimizerParts = 7;  // sources part_<n>.cu

template <class Ops>
void backward_(std::vector<Tensor> weights, std::vector<Tensor> generations,
               std::vector<Tensor> state, std::vector<Tensor> dirty_bits,
               std::vector<Tensor> copy_on_write, Tensor row_clock, Tensor hyper, Tensor meta,
               Tensor init_data, Tensor grad_output, Tensor ids, Tensor handles, Tensor offsets,
               std::optional<Tensor> per_sample_weights, Tensor updates,
               std::vector<int64_t> feature_tables, std::vector<int64_t> feature_dims,
               int64_t pooling) {
  using Optimizer = typename Ops::Optimizer;
  const Call call(Ops::kBackward, "weights", weights.empty() ? meta : weights[0]);
  const GroupRows rows = group_rows(call, weights, generations, meta, init_data);
  LookupCall lookup = lookup_call(call, rows, ids, handles, offsets, per_sample_weights,
                                  feature_tables, feature_dims, pooling);
  // Everything that may fail precedes UpdateCall, the first change.
  const GradientSort sort(call, rows, &lookup, grad_output);
  const UpdateCall update(call, rows, kStateKinds<Optimizer>, weights, state, dirty_bits,
                          copy_on_write, row_clock, hyper, updates, "feature_tables",
                          feature_tables);
  const int64_t count = lookup.args.features.count;
  const auto is_touched = [&](size_t s) { return !lookup.slab_features[s].empty() && count > 0; };
  for (size_t s = 0; s < rows.slabs.size(); ++s) {
    if (is_touched(s)) update.check_runs(call, rows, s, sort, count);
  }
  for (size_t s = 0; s < rows.slabs.size(); ++s) {
    if (!is_touched(s)) continue;
    const UpdateArgs args = update.slab(call, rows, s);
    launch_update<Optimizer>(call, args, {sort.args(), sort.runs(), {}, false}, sort.aligned(s),
                             count);
  }
}

template <class Ops>
void update_(std::vector<Tensor> weights, std::vector<Tensor> generations,
             std::vector<Tensor> state, std::vector<Tensor> dirty_bits,
             std::vector<Tensor> copy_on_write, Tensor row_clock, Tensor hyper, Tensor meta,
             Tensor init_data, std::vector<Tensor> handles, std::vector<Tensor> ids,
             std::vector<Tensor> tables, std::vector<Tensor> gradients, Tensor counts,
             Tensor updates, std::vector<int64_t> updated_tables) {
  using Optimizer = typename Ops::Optimizer;
  const Call call(Ops::kUpdate, "weights", weights.empty() ? meta : weights[0]);
  const GroupRows rows = group_rows(call, weights, generations, meta, init_data);
  std::vector<ReducedRows> reduced =
      reduced_rows(call, rows, weights, handles, ids, tables, gradients, counts);
  const UpdateCall update(call, rows, kStateKinds<Optimizer>, weights, state, dirty_bits,
                          copy_on_write, row_clock, hyper, updates, "updated_tables",
                          updated_tables);
  for (ReducedRows& entries : reduced) entries.updated = update.updated();
  for (size_t s = 0; s < reduced.size(); ++s) update.check_entries(call, rows, s, reduced[s]);
  for (size_t s = 0; s < reduced.size(); ++s) {
    const UpdateArgs args = update.slab(call, rows, s);
    launch_update<Optimizer>(call, args, {{}, {}, reduced[s], true},
                             reduced[s].aligned(rows.slabs[s]), reduced[s].capacity);
  }
}

template <int kPart, class Library>
void implement_optimizers(Library& library) {
  for_optimizers_of_part<kPart, kOptimizerParts>([&](auto ops) {
    using Ops = decltype(ops);
    library.impl(Ops::kUpdate, TORCH_BOX(&update_<Ops>));
    library.impl(Ops::kBackward, TORCH_BOX(&backward_<Ops>));
  });
}

}  // namespace dynemb::cuda
