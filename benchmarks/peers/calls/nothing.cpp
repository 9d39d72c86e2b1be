// Kernels that do nothing, in place of those of the ops that lookups and their backward call. With
// them a call costs what torch and Python take for it: the limit of overhead.py.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <numeric>
#include <optional>
#include <tuple>
#include <vector>

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Numbers = std::vector<int64_t>;
using Tensors = std::vector<Tensor>;

constexpr int64_t kPoolNone = 2;  // kPoolNone of csrc/core

Tensor empty(const Numbers& size, ScalarType dtype) { return torch::stable::empty(size, dtype); }

Tensor output_of(const Tensor& ids, const Tensor& offsets, const Numbers& dims, int64_t dim,
                 int64_t pooling) {
  if (pooling == kPoolNone)
    return empty({ids.numel(), dims.empty() ? dim : dims[0]}, ScalarType::Float);
  const auto features = static_cast<int64_t>(dims.empty() ? 1 : dims.size());
  const int64_t columns =
      dims.empty() ? dim : std::accumulate(dims.begin(), dims.end(), int64_t{0});
  return empty({(offsets.numel() - 1) / features, columns}, ScalarType::Float);
}

Tensor find_or_insert_(Tensor /*buckets*/, Tensor /*scores*/, Tensor /*tables*/, Tensor /*slabs*/,
                       Tensor /*free_rows*/, Tensor /*sketch*/, Tensor /*evicted*/, Tensor /*meta*/,
                       Tensor /*policy*/, Tensor /*clock*/, Tensor ids, Tensor /*offsets*/,
                       std::optional<Tensor> /*admit*/, Numbers /*feature_tables*/,
                       Numbers /*feature_policies*/) {
  return empty({ids.numel()}, ScalarType::Long);
}

std::tuple<Tensor, Tensor> embedding_forward(Tensors weights, Tensors /*generations*/,
                                             Tensor /*row_clock*/, Tensor /*meta*/,
                                             Tensor /*init_data*/, Tensor ids, Tensor /*handles*/,
                                             Tensor offsets,
                                             std::optional<Tensor> /*per_sample_weights*/,
                                             Numbers /*feature_tables*/, Numbers feature_dims,
                                             int64_t pooling) {
  return {output_of(ids, offsets, feature_dims, weights[0].size(1), pooling),
          empty({1}, ScalarType::Long)};
}

Tensor find_and_read(Tensor /*buckets*/, Tensor /*tables*/, Tensor /*meta*/, Tensors weights,
                     Tensors /*generations*/, Tensor /*init_data*/, Tensor ids, Tensor offsets,
                     std::optional<Tensor> /*per_sample_weights*/, Numbers /*feature_tables*/,
                     Numbers feature_dims, int64_t pooling, bool include_last_offset) {
  if (!include_last_offset) return empty({offsets.numel(), weights[0].size(1)}, ScalarType::Float);
  return output_of(ids, offsets, feature_dims, weights[0].size(1), pooling);
}

std::tuple<Tensor, Tensor, Tensor> insert_and_read(int64_t /*lookup*/, Tensor ids, Tensor offsets,
                                                   std::optional<Tensor> /*per_sample_weights*/,
                                                   Numbers /*feature_tables*/, Numbers feature_dims,
                                                   int64_t pooling, Numbers /*feature_policies*/) {
  return {output_of(ids, offsets, feature_dims, feature_dims[0], pooling),
          empty({ids.numel()}, ScalarType::Long), empty({1}, ScalarType::Long)};
}

void embedding_backward_(Tensors /*weights*/, Tensors /*generations*/, Tensors /*state*/,
                         Tensors /*dirty_bits*/, Tensors /*copy_on_write*/, Tensor /*row_clock*/,
                         Tensor /*hyper*/, Tensor /*meta*/, Tensor /*init_data*/,
                         Tensor /*grad_output*/, Tensor /*ids*/, Tensor /*handles*/,
                         Tensor /*offsets*/, std::optional<Tensor> /*per_sample_weights*/,
                         Tensor /*updates*/, Numbers /*feature_tables*/, Numbers /*feature_dims*/,
                         int64_t /*pooling*/, int64_t /*optimizer*/) {}

}  // namespace

// What is registered last is called; torch warns of it.
STABLE_TORCH_LIBRARY_IMPL(dynemb, CPU, m) {
  m.impl("find_or_insert_", TORCH_BOX(&find_or_insert_));
  m.impl("embedding_forward", TORCH_BOX(&embedding_forward));
  m.impl("find_and_read", TORCH_BOX(&find_and_read));
  m.impl("insert_and_read", TORCH_BOX(&insert_and_read));
  m.impl("embedding_backward_", TORCH_BOX(&embedding_backward_));
}
