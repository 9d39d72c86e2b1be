#include "arguments/pool_rows.h"

namespace dynemb {

BagTensors bag_tensors(const CallContext& call, const Tensor& positions, const Tensor& offsets,
                       int64_t features, int64_t dim) {
  check_words(call, "positions", positions);
  check_words(call, "offsets", offsets);
  DYNEMB_CHECK(features >= 1, "dynemb::", call.op, ": features is ", features,
               ", expected at least 1");
  const int64_t bags = offsets.size(0) - 1;
  DYNEMB_CHECK(bags >= 0 && bags % features == 0, "dynemb::", call.op, ": offsets has ", bags + 1,
               " elements, expected one more than a multiple of features, ", features);
  result_bytes(call.op, "features", features, {features, dim}, 4);
  return {static_cast<const int64_t*>(positions.data_ptr()),
          static_cast<const int64_t*>(offsets.data_ptr()), positions.size(0), bags,
          bags / features};
}

const float* position_weights(const CallContext& call, const std::optional<Tensor>& weights,
                              int64_t count) {
  if (!weights.has_value()) return nullptr;
  check_tensor(call, "weights", *weights, ScalarType::Float);
  check_length(call.op, "weights", *weights, count);
  return static_cast<const float*>(weights->data_ptr());
}

void check_matrix(const CallContext& call, const char* name, const Tensor& rows) {
  check_tensor(call, name, rows, ScalarType::Float);
  DYNEMB_CHECK(rows.dim() == 2, "dynemb::", call.op, ": ", name, " has ", rows.dim(),
               " dimensions, expected 2");
}

void check_row_pooling(const char* op, int64_t pooling) {
  DYNEMB_CHECK(pooling == kPoolSum || pooling == kPoolMean, "dynemb::", op, ": pooling is ",
               pooling, ", expected 0 (sum) or 1 (mean)");
}

void check_row_count(const char* op, int64_t rows) {
  DYNEMB_CHECK(rows >= 0, "dynemb::", op, ": rows is ", rows, ", expected at least 0");
}

int64_t pooled_dim(const CallContext& call, const Tensor& grad, int64_t features, int64_t rows,
                   int64_t pooling) {
  check_matrix(call, "grad", grad);
  check_row_pooling(call.op, pooling);
  check_row_count(call.op, rows);
  DYNEMB_CHECK(features >= 1 && grad.size(1) % features == 0, "dynemb::", call.op, ": grad has ",
               grad.size(1), " columns, expected a multiple of features, ", features);
  return grad.size(1) / features;
}

}  // namespace dynemb
