// Tensors from nested lists of a JSON text, and back.

#pragma once

#include <ATen/Tensor.h>
#include <ATen/ops/tensor.h>

#include <ostream>
#include <stdexcept>
#include <vector>

#include "serving/json.h"
#include "serving/model.h"

namespace dynemb::serving {

namespace detail {

// Appends the numbers of nested lists, and the shape of what lies `depth` lists deep.
inline void flatten(const Json& value, size_t depth, std::vector<double>& numbers,
                    std::vector<int64_t>& shape) {
  if (!value.is_array()) return numbers.push_back(value.number());
  const auto length = static_cast<int64_t>(value.array().size());
  if (shape.size() == depth) shape.push_back(length);
  if (shape[depth] != length) throw std::invalid_argument("lists of a tensor differ in length");
  for (const Json& part : value.array()) flatten(part, depth + 1, numbers, shape);
}

// Ids are whole numbers of 64 bits, which doubles are not.
inline void flatten_ids(const Json& value, std::vector<int64_t>& ids) {
  if (!value.is_array()) return ids.push_back(value.integer());
  for (const Json& part : value.array()) flatten_ids(part, ids);
}

}  // namespace detail

// A tensor of nested lists. An empty list does not tell the sizes in it: they are `sizes`. Throws
// std::runtime_error or std::invalid_argument where the lists are no tensor of numbers.
inline at::Tensor tensor_of(const Json& value, at::ScalarType dtype,
                            const std::vector<int64_t>& sizes = {}) {
  std::vector<double> numbers;
  std::vector<int64_t> shape, ids;
  detail::flatten(value, 0, numbers, shape);
  for (size_t dim = shape.size(); dim < sizes.size(); ++dim) shape.push_back(sizes[dim]);
  if (!c10::isIntegralType(dtype, false)) return at::tensor(numbers).reshape(shape).to(dtype);
  detail::flatten_ids(value, ids);
  return at::tensor(ids, at::kLong).reshape(shape).to(dtype);
}

// A tensor that a model takes.
inline at::Tensor tensor_of(const Json& value, const Input& input) {
  std::vector<int64_t> sizes;
  for (const auto& size : input.sizes) sizes.push_back(size ? size->plus : 0);
  return tensor_of(value, input.dtype, sizes);
}

// Prints a tensor as nested lists of numbers.
inline void print(const at::Tensor& tensor, std::ostream& out) {
  if (tensor.dim() == 0) {
    out << tensor.item<double>();
    return;
  }
  out << '[';
  for (int64_t row = 0; row < tensor.size(0); ++row) {
    if (row > 0) out << ',';
    print(tensor[row], out);
  }
  out << ']';
}

}  // namespace dynemb::serving
