#include "arguments/lookup.h"

namespace dynemb {

const float* bag_weights(const CallContext& call, const IdTensors& ids,
                         const std::optional<Tensor>& per_sample_weights,
                         const std::vector<int64_t>& feature_dims, int64_t pooling) {
  const auto features = static_cast<size_t>(ids.features);
  DYNEMB_CHECK(feature_dims.size() == features, "dynemb::", call.op, ": feature_dims has ",
               feature_dims.size(), " elements, expected ", features);
  DYNEMB_CHECK(pooling >= kPoolSum && pooling <= kPoolNone, "dynemb::", call.op, ": pooling is ",
               pooling, ", expected 0 (sum), 1 (mean) or 2 (none)");
  const bool pooled = pooling != kPoolNone;
  DYNEMB_CHECK(!pooled || ids.offsets != nullptr, "dynemb::", call.op,
               ": offsets is empty, expected where each of the bags that are pooled begins, and "
               "the number of ids");
  if (per_sample_weights.has_value()) {
    check_tensor(call, "per_sample_weights", *per_sample_weights, ScalarType::Float);
    check_length(call.op, "per_sample_weights", *per_sample_weights, ids.count);
  }
  for (const int64_t dim : feature_dims) {
    DYNEMB_CHECK(pooled || dim == feature_dims[0], "dynemb::", call.op,
                 ": features without pooling must have one dim, got ", feature_dims[0], " and ",
                 dim);
  }
  return per_sample_weights.has_value() ? static_cast<const float*>(per_sample_weights->data_ptr())
                                        : nullptr;
}

LookupTensors lookup_tensors(const CallContext& call, const IdTensors& ids, const Tensor& handles,
                             const std::optional<Tensor>& per_sample_weights,
                             const std::vector<int64_t>& feature_dims, int64_t pooling) {
  const int64_t* handle = id_words(call, "handles", handles, ids.count);
  return {handle, bag_weights(call, ids, per_sample_weights, feature_dims, pooling)};
}

OutputColumns output_columns(const std::vector<int64_t>& feature_dims, int64_t pooling) {
  const bool pooled = pooling != kPoolNone;
  OutputColumns columns{{}, 0};
  columns.first.reserve(feature_dims.size());
  for (const int64_t dim : feature_dims) {
    columns.first.push_back(pooled ? columns.count : 0);
    // unsigned: the dims of unknown tables are refused later
    const uint64_t sum = static_cast<uint64_t>(columns.count) + static_cast<uint64_t>(dim);
    columns.count = pooled ? static_cast<int64_t>(sum) : dim;
  }
  return columns;
}

void check_is_pooled(const char* op, int64_t pooling, const char* instead) {
  DYNEMB_CHECK(pooling != kPoolNone, "dynemb::", op, ": pooling is 2 (none): ", instead);
}

const float* output_gradient(const CallContext& call, const Tensor& gradient, int64_t rows,
                             int64_t columns) {
  check_tensor(call, "grad_output", gradient, ScalarType::Float);
  DYNEMB_CHECK(gradient.dim() == 2, "dynemb::", call.op, ": grad_output has ", gradient.dim(),
               " dimensions, expected 2");
  check_size(call.op, "grad_output", gradient, 0, rows);
  check_size(call.op, "grad_output", gradient, 1, columns);
  return static_cast<const float*>(gradient.data_ptr());
}

}  // namespace dynemb
