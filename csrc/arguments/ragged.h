// Checked arguments of ops on ragged rows.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "arguments/tensors.h"

namespace dynemb {

// Bytes of a value: 1, 2, 4 or 8. Raises for another dtype.
int64_t value_bytes(const char* op, const char* name, size_t i, const Tensor& values);
// Bytes of the values of each feature. Raises for an empty list, and unless all are contiguous, of
// `dims` dimensions (kAnyDims: any) and on the right device.
std::vector<int64_t> check_values(const CallContext& call, const char* name,
                                  const std::vector<Tensor>& list, int64_t dims);
// Values of each feature, their offsets, and weights of the features in `weighted`, as many as the
// values. Returns the position of each feature's weights in `weights`, or -1. Does not read
// offsets.
std::vector<int64_t> check_ragged(const CallContext& call, const char* values_name,
                                  const std::vector<Tensor>& values, const char* offsets_name,
                                  const std::vector<Tensor>& offsets, const char* weights_name,
                                  const std::vector<Tensor>& weights,
                                  const std::vector<int64_t>& weighted);
// Like check_list; also raises unless each tensor has an element.
void check_offset_lists(const CallContext& call, const char* name,
                        const std::vector<Tensor>& offsets, size_t features);
// Raises unless each of `features` has a number, at least `least`.
void check_numbers(const char* op, const char* name, const std::vector<int64_t>& numbers,
                   size_t features, int64_t least);
// Raises unless both have the same number of rows for each feature.
void check_same_rows(const char* op, const std::vector<Tensor>& x_offsets,
                     const std::vector<Tensor>& y_offsets);

// Raises if argument `name` asks for rows of `value` in a result of so many bytes, although the
// longest row of the input has `most`, and the result is large. Such a result is almost all
// padding, and writing it would take minutes.
void check_padding(const char* op, const std::string& name, int64_t value, int64_t most,
                   int64_t bytes);

// Arguments of ragged_tile and its gradients.
void check_tiles(const char* op, const std::vector<int64_t>& tile_lens,
                 const std::vector<int64_t>& pad_left);
// Raises unless tiles of so many bags are addressable, [batch, tile_len * dim] floats each, and are
// not almost all padding for so many positions.
void check_tile_sizes(const char* op, const std::vector<int64_t>& tile_lens, int64_t batch,
                      int64_t dim, int64_t positions);
// The dim of rows, from the gradients of their tiles. check_tile_grads compares the number of rows
// with that of bags.
int64_t tiled_dim(const CallContext& call, const std::vector<Tensor>& grads, int64_t rows,
                  const std::vector<int64_t>& tile_lens, const std::vector<int64_t>& pad_left);
void check_tile_grads(const char* op, const std::vector<Tensor>& grads,
                      const std::vector<int64_t>& tile_lens, int64_t batch, int64_t dim);

// Offsets of several depths, feature after feature, each from outermost to innermost.
struct Depths {
  std::vector<int64_t> first;  // [features + 1], in offsets and lengths
};
// `lengths`: of dense dimensions, one for each of `offsets`.
Depths check_depths(const CallContext& call, const std::vector<Tensor>& values,
                    const std::vector<Tensor>& offsets, const std::vector<int64_t>& depths,
                    const std::vector<int64_t>& lengths);
// Bytes of the values of each feature's dense tensor.
std::vector<int64_t> check_dense(const CallContext& call, const std::vector<Tensor>& dense);

// The bits of a number as a value of the dtype: of `floating`, or of `integer` for other dtypes.
int64_t value_bits(ScalarType dtype, double floating, int64_t integer);
// Mask of the bits that decide whether two values of the dtype are equal: for a zero, all but the
// sign.
int64_t equal_mask(ScalarType dtype, double floating);

}  // namespace dynemb
