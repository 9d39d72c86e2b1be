// Checked arguments of lookups and gradients: ids, features and bags.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "arguments/index.h"
#include "core/rows/pooling.h"

namespace dynemb {

struct LookupTensors {
  const int64_t* handles;
  const float* id_weights;  // nullptr: all 1
};
// The weights of ids, nullptr: all 1. Also checks the features as lookup_tensors does.
const float* bag_weights(const CallContext& call, const IdTensors& ids,
                         const std::optional<Tensor>& per_sample_weights,
                         const std::vector<int64_t>& feature_dims, int64_t pooling);
// Without pooling all features have the same dim, and offsets only separate them. Does not compare
// the dims with those of the tables.
LookupTensors lookup_tensors(const CallContext& call, const IdTensors& ids, const Tensor& handles,
                             const std::optional<Tensor>& per_sample_weights,
                             const std::vector<int64_t>& feature_dims, int64_t pooling);

// The columns of output and gradient, for features with the dims of their tables.
struct OutputColumns {
  std::vector<int64_t> first;  // of each feature
  int64_t count;               // row width
};
OutputColumns output_columns(const std::vector<int64_t>& feature_dims, int64_t pooling);

// Raises unless ids are pooled; `instead` is the remedy.
void check_is_pooled(const char* op, int64_t pooling, const char* instead);

// The gradient of a lookup's output.
const float* output_gradient(const CallContext& call, const Tensor& gradient, int64_t rows,
                             int64_t columns);

}  // namespace dynemb
