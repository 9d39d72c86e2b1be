// reduce_grad: the gradient of every row that a lookup touched. bag_weight_grad: the gradient of
// per_sample_weights.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <tuple>
#include <vector>

#include "cpu/gradient/runs.h"
#include "cpu/rows/floats.h"
#include "cpu/rows/initial_row.h"

namespace dynemb::cpu {
namespace {

// Per slab: handle, id and table of each distinct row, and the sum of its gradients, in the order
// of rows. The tensors have room for every id of the call; counts says how many entries are set,
// the others are zeros.
std::tuple<std::vector<Tensor>, std::vector<Tensor>, std::vector<Tensor>, std::vector<Tensor>,
           Tensor>
reduce_grad(std::vector<Tensor> weights, std::vector<Tensor> generations, Tensor meta,
            Tensor init_data, Tensor grad_output, Tensor ids, Tensor handles, Tensor offsets,
            std::optional<Tensor> per_sample_weights, std::vector<int64_t> feature_tables,
            std::vector<int64_t> feature_dims, int64_t pooling) {
  const char* op = "reduce_grad";
  const auto tables = group_rows(op, weights, generations, meta, init_data);
  const LookupArgs lookup = lookup_call(op, tables, ids, handles, offsets, per_sample_weights,
                                        feature_tables, feature_dims, pooling);
  const GradientSource source = gradient_source(op, lookup, grad_output);
  const int64_t n = lookup.features.count;
  Tensor counts = zeros_cpu({static_cast<int64_t>(weights.size())}, ScalarType::Long);
  std::vector<Tensor> row_handles, row_ids, row_tables, gradients;
  for (size_t s = 0; s < weights.size(); ++s) {
    const int64_t dim = weights[s].size(1);
    const GradientRuns runs = gradient_runs(op, lookup, tables, static_cast<int64_t>(s), dim);
    row_handles.push_back(empty_cpu({n}, ScalarType::Long));
    row_ids.push_back(empty_cpu({n}, ScalarType::Long));
    row_tables.push_back(empty_cpu({n}, ScalarType::Long));
    gradients.push_back(empty_cpu({n, dim}, ScalarType::Float));
    const ReducedEntries entries{static_cast<int64_t*>(row_handles[s].data_ptr()),
                                 static_cast<int64_t*>(row_ids[s].data_ptr()),
                                 static_cast<int64_t*>(row_tables[s].data_ptr()),
                                 static_cast<float*>(gradients[s].data_ptr())};
    const int64_t count = runs.count();
    static_cast<int64_t*>(counts.data_ptr())[s] = count;
    for (int64_t* of_row : {entries.handle, entries.id, entries.table}) {
      std::fill(of_row + count, of_row + n, 0);
    }
    std::fill(entries.gradient + count * dim, entries.gradient + n * dim, 0.0f);
    reduce_runs(source, runs, entries);
  }
  return {row_handles, row_ids, row_tables, gradients, counts};
}

struct WeightGradJob {
  const LookupArgs* lookup;
  const TableRows* table;
  BagTile tile;
  const float* gradient;
  float* scratch;  // one row
  float* output;   // [ids]
};

// d sum / d w_i = g . e_i;  d mean / d w_i = (g . e_i - g . mean) / sum(w), the mean over weights.
DYNEMB_INLINE void bag_weight_grad_tile_body(const WeightGradJob& job) {
  const LookupArgs& lookup = *job.lookup;
  const TableRows& table = *job.table;
  for (int64_t b = job.tile.begin; b < job.tile.end; ++b) {
    const int64_t bag = job.tile.feature * lookup.batch + b;
    const float* g = job.gradient + b * lookup.columns + lookup.column[job.tile.feature];
    float along_output = 0.0f;
    for (int64_t i = lookup.offsets[bag]; i < lookup.offsets[bag + 1]; ++i) {
      const float* row = resolve_row(table, lookup.handles[i], lookup.features.ids[i], job.scratch);
      job.output[i] = row == nullptr ? 0.0f : dot(g, row, table.dim);
      along_output += lookup.id_weights[i] * job.output[i];
    }
    if (lookup.pooling != kPoolMean) continue;
    const MeanDivisor divisor = bag_divisor(lookup, bag);
    for (int64_t i = lookup.offsets[bag]; i < lookup.offsets[bag + 1]; ++i) {
      job.output[i] = lookup.handles[i] == kPaddingHandle
                          ? 0.0f
                          : divisor.divide(job.output[i] - divisor.divide(along_output));
    }
  }
}
DYNEMB_SIMD_VARIANTS(bag_weight_grad_tile, (const WeightGradJob& job), (job))

// Call this before the update of the same backward: it reads the rows of the forward.
Tensor bag_weight_grad(std::vector<Tensor> weights, std::vector<Tensor> generations, Tensor meta,
                       Tensor init_data, Tensor grad_output, Tensor ids, Tensor handles,
                       Tensor offsets, Tensor per_sample_weights,
                       std::vector<int64_t> feature_tables, std::vector<int64_t> feature_dims,
                       int64_t pooling) {
  const char* op = "bag_weight_grad";
  const auto tables = group_rows(op, weights, generations, meta, init_data);
  const LookupArgs lookup = lookup_call(op, tables, ids, handles, offsets, per_sample_weights,
                                        feature_tables, feature_dims, pooling);
  check_is_pooled(op, pooling, "no weights there");
  const GradientSource source = gradient_source(op, lookup, grad_output);
  Tensor result = empty_cpu({lookup.features.count}, ScalarType::Float);
  auto* output = static_cast<float*>(result.data_ptr());
  const std::vector<BagTile> tiles = make_bag_tiles(lookup);
  parallel_units(static_cast<int64_t>(tiles.size()), lookup.features.count,
                 [&](int64_t begin, int64_t end) {
                   std::vector<float> scratch(static_cast<size_t>(lookup.columns));
                   for (int64_t i = begin; i < end; ++i) {
                     const TableRows& table = tables[lookup.features.table[tiles[i].feature]];
                     bag_weight_grad_tile(
                         {&lookup, &table, tiles[i], source.gradient, scratch.data(), output});
                   }
                 });
  return result;
}

}  // namespace
}  // namespace dynemb::cpu

STABLE_TORCH_LIBRARY_IMPL(dynemb, CPU, m) {
  m.impl("reduce_grad", TORCH_BOX(&dynemb::cpu::reduce_grad));
  m.impl("bag_weight_grad", TORCH_BOX(&dynemb::cpu::bag_weight_grad));
}
