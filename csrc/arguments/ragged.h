// Checks of ragged arguments that all devices share.
#pragma once

#include <cstdint>
#include <vector>

#include "arguments/tensors.h"

namespace dynemb {

// Bytes of a value: 1, 2, 4 or 8. Raises for another dtype.
int64_t value_bytes(const char* op, const char* name, size_t i, const Tensor& values);
// Bytes of the values of each feature. Raises unless all are contiguous and of `dims` dimensions.
std::vector<int64_t> check_values(const char* op, const char* name, const std::vector<Tensor>& list,
                                  int64_t dims);
// The weights of each feature among `weights`, or -1. `weighted`: the features that have weights.
// Raises unless these are as many as the values.
std::vector<int64_t> check_weights(const char* op, const char* name,
                                   const std::vector<Tensor>& weights,
                                   const std::vector<int64_t>& weighted,
                                   const std::vector<Tensor>& values);
// Raises unless each of `features` has a number of at least `least`.
void check_numbers(const char* op, const char* name, const std::vector<int64_t>& numbers,
                   size_t features, int64_t least);
// Raises unless each offsets tensor has an element.
void check_not_empty(const char* op, const char* name, const std::vector<Tensor>& list);
// Raises unless both have the same number of rows for each feature.
void check_same_rows(const char* op, const std::vector<Tensor>& x_offsets,
                     const std::vector<Tensor>& y_offsets);

// Arguments of ragged_tile and its gradients.
void check_tiles(const char* op, const std::vector<int64_t>& tile_lens,
                 const std::vector<int64_t>& pad_left);
// Raises unless tiles of so many bags can be addressed: [batch, tile_len * dim] floats each.
void check_tile_sizes(const char* op, const std::vector<int64_t>& tile_lens, int64_t batch,
                      int64_t dim);
void check_tile_grads(const char* op, const std::vector<Tensor>& grads,
                      const std::vector<int64_t>& tile_lens, int64_t batch, int64_t dim);

// Offsets of several depths, feature after feature, each from outermost to innermost.
struct Depths {
  std::vector<int64_t> first;  // [features + 1], in offsets and lengths
};
Depths check_depths(const char* op, const std::vector<Tensor>& offsets,
                    const std::vector<int64_t>& depths, const std::vector<int64_t>& lengths,
                    size_t features);

// The bits of a number as a value of the dtype: of `floating`, or of `integer` for other dtypes.
int64_t value_bits(ScalarType dtype, double floating, int64_t integer);
// Which bits say that two values of the dtype are equal: without the sign, for a zero.
int64_t equal_mask(ScalarType dtype, double floating);

}  // namespace dynemb
