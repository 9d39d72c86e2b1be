// reduce_grad: the gradient of every row that a lookup touched. bag_weight_grad: the gradient of
// per_sample_weights.
#include <optional>
#include <tuple>

#include "cuda/gradient/runs.h"
#include "cuda/rows/slab_lookup.h"

namespace dynemb::cuda {
namespace {

// A group of lanes per run: 4 * dim bytes read an occurrence, 4 * dim + 24 written a run.
template <class Group>
__global__ void write_reduced(Group group, GradientArgs gradients, GradientRuns runs, int64_t slab,
                              int64_t dim, ReducedOutput output) {
  constexpr int kWidth = Group::kWidth;
  const LookupArgs& lookup = gradients.lookup;
  const FeatureArgs& features = lookup.features;
  const int lane = group.lane();
  const int64_t first_run = runs.slab_first[slab];
  const int64_t count = runs.slab_first[slab + 1] - first_run;
  if (output.count != nullptr && thread_number() == 0) *output.count = count;
  const int64_t before = output.before == nullptr ? 0 : *output.before;
  if (before < 0) return;
  const int64_t stride = group.total();
  for (int64_t r = group.number(); r < count; r += stride) {
    const int64_t position = runs.positions[runs.begin[first_run + r]];
    const int64_t entry = before + r;
    if (lane == 0) {
      output.handles[entry] = lookup.handles[position];
      output.ids[entry] = features.ids[position];
      output.tables[entry] = features.table_of(position);
    }
    for (int64_t first = 0; first < dim; first += group.stride()) {
      const int64_t column = group.column(first);
      const Floats<kWidth> sum = sum_run<1>(group, gradients, runs, first_run + r, column, dim);
      if (column < dim) store_floats<kWidth>(output.gradients + entry * dim + column, sum);
    }
  }
}

// Per slab: handle, id and table of each distinct row, and the sum of its gradients, in the order
// of rows. The tensors have space for every id of the call; counts has the number of entries, the
// others are zeros.
std::tuple<std::vector<Tensor>, std::vector<Tensor>, std::vector<Tensor>, std::vector<Tensor>,
           Tensor>
reduce_grad(std::vector<Tensor> weights, std::vector<Tensor> generations, Tensor meta,
            Tensor init_data, Tensor grad_output, Tensor ids, Tensor handles, Tensor offsets,
            std::optional<Tensor> per_sample_weights, std::vector<int64_t> feature_tables,
            std::vector<int64_t> feature_dims, int64_t pooling) {
  const Call call("reduce_grad", "weights", weights.empty() ? meta : weights[0]);
  const GroupRows rows = group_rows(call, weights, generations, meta, init_data);
  LookupCall lookup = lookup_call(call, rows, ids, handles, offsets, per_sample_weights,
                                  feature_tables, feature_dims, pooling);
  const GradientSort sort(call, rows, &lookup, grad_output);
  const int64_t n = lookup.args.features.count;
  Tensor counts = call.empty({static_cast<int64_t>(weights.size())}, ScalarType::Long);
  std::vector<Tensor> row_handles, row_ids, row_tables, gradients;
  for (size_t s = 0; s < weights.size(); ++s) {
    const int64_t dim = rows.slabs[s].dim;
    row_handles.push_back(call.empty({n}, ScalarType::Long));
    row_ids.push_back(call.empty({n}, ScalarType::Long));
    row_tables.push_back(call.empty({n}, ScalarType::Long));
    gradients.push_back(call.empty({n, dim}, ScalarType::Float));
    const ReducedOutput output{static_cast<int64_t*>(row_handles[s].data_ptr()),
                               static_cast<int64_t*>(row_ids[s].data_ptr()),
                               static_cast<int64_t*>(row_tables[s].data_ptr()),
                               static_cast<float*>(gradients[s].data_ptr()),
                               static_cast<int64_t*>(counts.data_ptr()) + s,
                               nullptr};
    for (int64_t* entries : {output.handles, output.ids, output.tables}) {
      call.fill(entries, 0, n * 8);
    }
    call.fill(output.gradients, 0, n * dim * 4);
    write_reduced_rows(call, sort, s, dim, n, output);
  }
  return {row_handles, row_ids, row_tables, gradients, counts};
}

// d sum / d w_i = g . e_i;  d mean / d w_i = (g . e_i - g . mean) / sum(w), the mean over weights.
// A group of lanes per bag: bytes as in pool_bags (lookup.cu), and 4 * dim of gradient a bag.
template <class Group>
__global__ void grad_of_weights(Group group, SlabLookup job, const float* pooled_gradient,
                                float* output) {
  constexpr int kWidth = Group::kWidth;
  const LookupArgs& lookup = job.lookup;
  const FeatureArgs& features = lookup.features;
  if (group.number() >= job.bags()) return;
  const SlabLookup::Bag bag = job.bag(group.number());
  if (!job.has_rows_of(bag.feature)) return;
  const TableInit init = table_init(job.rows, features.table[bag.feature]);
  const int lane = group.lane();
  const float* gradient = pooled_gradient + bag.offset;
  float along_output = 0.0f;
  float total_weight = 0.0f;
  for (int64_t i = bag.begin; i < bag.end; ++i) {
    const int64_t source = value_source(job.slab, lookup.handles[i], job.errors);
    float product = 0.0f;
    for (int64_t column = group.column(0); column < job.slab.dim; column += group.stride()) {
      add_products(&product, load_floats<kWidth>(gradient + column),
                   source_floats<kWidth>(job.slab, init, source, features.ids[i], column));
    }
    product = group.sum(product);
    if (source == kFromPadding || source == kFromZeros) product = 0.0f;
    along_output += lookup.id_weights[i] * product;
    if (source != kFromPadding) total_weight += lookup.id_weights[i];
    if (lane == 0) output[i] = product;
  }
  if (lookup.pooling != kPoolMean) return;
  const MeanDivisor divisor = mean_divisor(total_weight);
  __syncwarp(group.mask());  // lane 0 has written the products
  for (int64_t i = bag.begin + lane; i < bag.end; i += group.size()) {
    output[i] = lookup.handles[i] == kPaddingHandle
                    ? 0.0f
                    : divisor.divide(output[i] - divisor.divide(along_output));
  }
}

// Call this before the update of the same backward: it reads the rows of the forward.
Tensor bag_weight_grad(std::vector<Tensor> weights, std::vector<Tensor> generations, Tensor meta,
                       Tensor init_data, Tensor grad_output, Tensor ids, Tensor handles,
                       Tensor offsets, Tensor per_sample_weights,
                       std::vector<int64_t> feature_tables, std::vector<int64_t> feature_dims,
                       int64_t pooling) {
  const Call call("bag_weight_grad", "weights", weights.empty() ? meta : weights[0]);
  const GroupRows rows = group_rows(call, weights, generations, meta, init_data);
  LookupCall lookup = lookup_call(call, rows, ids, handles, offsets, per_sample_weights,
                                  feature_tables, feature_dims, pooling);
  check_is_pooled(call.op, pooling, "no weights there");
  const float* gradient =
      output_gradient(call, grad_output, lookup.output_rows, lookup.output_columns);
  Tensor result = call.empty({lookup.args.features.count}, ScalarType::Float);
  // ids beyond the last offset (an error) belong to no bag
  call.fill(result.data_ptr(), 0, lookup.args.features.count * 4);
  Scratch scratch;
  const auto words = scratch.add<int64_t>(static_cast<int64_t>(lookup.words.size()));
  scratch.allocate(call);
  const LookupWords uploaded = upload_lookup(call, &lookup, scratch.get(words));
  for (size_t s = 0; s < rows.slabs.size(); ++s) {
    if (lookup.slab_features[s].empty()) continue;
    const SlabLookup job = slab_lookup(call, rows, lookup, uploaded, s);
    if (job.bags() == 0) continue;
    with_lanes(rows.slabs[s].dim, lookup.slab_aligned[s] && is_aligned(gradient), [&](auto group) {
      call.launch(grad_of_weights<decltype(group)>, job.bags() * group.size(), 0, group, job,
                  gradient, static_cast<float*>(result.data_ptr()));
    });
  }
  return result;
}

}  // namespace

void write_reduced_rows(const Call& call, const GradientSort& sort, size_t slab, int64_t dim,
                        int64_t most_runs, const ReducedOutput& output) {
  with_lanes(dim, sort.aligned(slab), [&](auto group) {
    call.launch_strided(write_reduced<decltype(group)>, most_runs * group.size(), group,
                        sort.args(), sort.runs(), static_cast<int64_t>(slab), dim, output);
  });
}

}  // namespace dynemb::cuda

DYNEMB_IMPLEMENT_OPS(m) {
  m.impl("reduce_grad", TORCH_BOX(&dynemb::cuda::reduce_grad));
  m.impl("bag_weight_grad", TORCH_BOX(&dynemb::cuda::bag_weight_grad));
}
