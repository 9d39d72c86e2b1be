// Checked arguments of ops on bags of rows of a plain tensor.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "arguments/tensors.h"
#include "core/rows/pooling.h"

namespace dynemb {

// Bags of positions, feature after feature, as pointers into memory of their device.
struct BagTensors {
  const int64_t* positions;
  const int64_t* offsets;  // [bags + 1]
  int64_t count;           // positions
  int64_t bags;
  int64_t batch;  // bags of a feature
};
// Does not read positions and offsets. `dim`: columns of the rows.
BagTensors bag_tensors(const CallContext& call, const Tensor& positions, const Tensor& offsets,
                       int64_t features, int64_t dim);
// A weight for each of `count` positions; nullptr: all are 1.
const float* position_weights(const CallContext& call, const std::optional<Tensor>& weights,
                              int64_t count);

// Raises unless `rows` is a contiguous matrix of float32.
void check_matrix(const CallContext& call, const char* name, const Tensor& rows);
// Raises unless pooling is a sum or a mean.
void check_row_pooling(const char* op, int64_t pooling);
// Raises if there are too many rows.
void check_row_count(const char* op, int64_t rows);
// The dim of the rows, from the gradient `grad` [batch, features * dim] of their sums or means.
int64_t pooled_dim(const CallContext& call, const Tensor& grad, int64_t features, int64_t rows,
                   int64_t pooling);

}  // namespace dynemb
