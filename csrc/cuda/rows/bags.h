// Bags of rows of a plain tensor, and their gradients.
#pragma once

#include <optional>

#include "arguments/pool_rows.h"
#include "cuda/features/lists.h"
#include "cuda/gradient/runs.h"
#include "cuda/rows/args.h"

namespace dynemb::cuda {

// Bags of rows, feature after feature.
struct BagArgs {
  RaggedRows bags;  // of positions
  const int64_t* positions;
  const float* weights;  // of each position; nullptr: all 1
  int64_t batch;
  int64_t features;
  int64_t rows;
  int64_t dim;
  ErrorSink errors;

  int64_t bag_total() const { return bags.rows; }
  int64_t count() const { return bags.count; }

  // The row at a position; -1 and a report if it is out of range.
  __device__ __forceinline__ int64_t row_at(int64_t i) const {
    const int64_t row = positions[i];
    if (row >= 0 && row < rows) return row;
    errors.report(kErrorPosition, row);
    return -1;
  }
  __device__ __forceinline__ float weight_at(int64_t i) const {
    return weights == nullptr ? 1.0f : weights[i];
  }
  // Where the pooled rows of a bag begin in a tensor [batch, features, dim].
  __device__ __forceinline__ int64_t pooled_offset(int64_t bag) const {
    const int64_t feature = bag / batch;
    const int64_t b = bag - feature * batch;
    return (b * features + feature) * dim;
  }
  __device__ __forceinline__ void check(int64_t bag) const {
    check_offset(bags.offsets, bags.rows, bags.count, bag, errors);
  }
};

BagArgs bag_args(const Call& call, const Tensor& positions, const Tensor& offsets, int64_t features,
                 const std::optional<Tensor>& weights, int64_t rows, int64_t dim);

// Contribution of a position to the gradient of its row: factor * dim floats.
struct Terms {
  const float** from;  // [count]; unused if the key is `missing`
  float* factor;       // [count]
  uint32_t* key;       // [count] row, or `missing`
  uint32_t* position;  // [count]
  uint32_t missing;
};

// The gradient of rows [rows, dim]: the sum of each row's terms, in the order of positions.
class RowTerms {
 public:
  RowTerms(const Call& call, const BagArgs& bags);
  const Terms& terms() const { return terms_; }  // output of the caller
  // `aligned`: 16-byte loads of terms are possible.
  Tensor sum(const Call& call, bool aligned) const;

 private:
  int64_t count_;
  int64_t rows_;
  int64_t dim_;
  RunSort<uint32_t> sort_;
  Scratch scratch_;
  Terms terms_;
};

}  // namespace dynemb::cuda
