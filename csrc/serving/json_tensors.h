// Conversion of nested lists of a JSON text to tensors, and back.

#pragma once

#include <ATen/Tensor.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <ostream>
#include <stdexcept>
#include <string>
#include <vector>

#include "serving/json.h"
#include "serving/model.h"

namespace dynemb::serving {

namespace detail {

// Appends the content of nested lists, and the shape at depth `depth`; `deepest` is the depth of
// the numbers, -1 before the first one.
inline void flatten(const Json& value, int64_t depth, std::vector<const Json*>& leaves,
                    std::vector<int64_t>& shape, int64_t& deepest) {
  const auto levels = static_cast<int64_t>(shape.size());
  if (!value.is_array()) {
    if (deepest < 0) deepest = depth;
    if (depth != deepest || depth != levels) {
      throw std::invalid_argument("lists of a tensor differ in depth");
    }
    return leaves.push_back(&value);
  }
  if (depth == deepest) throw std::invalid_argument("lists of a tensor differ in depth");
  const auto length = static_cast<int64_t>(value.array().size());
  if (levels == depth) shape.push_back(length);
  if (shape[depth] != length) throw std::invalid_argument("lists of a tensor differ in length");
  for (const Json& part : value.array()) flatten(part, depth + 1, leaves, shape, deepest);
}

inline at::Tensor leaves_of(const std::vector<const Json*>& leaves, at::ScalarType dtype) {
  if (dtype == at::kBool || c10::isIntegralType(dtype, false)) {
    std::vector<int64_t> numbers;
    for (const Json* leaf : leaves) {
      numbers.push_back(dtype == at::kBool ? static_cast<int64_t>(leaf->truth()) : leaf->integer());
    }
    const at::Tensor whole = at::tensor(numbers, at::kLong), tensor = whole.to(dtype);
    if (!tensor.to(at::kLong).equal(whole)) {
      throw std::invalid_argument("expected a whole number of " +
                                  std::to_string(8 * tensor.element_size()) + " bits");
    }
    return tensor;
  }
  std::vector<double> numbers;
  for (const Json* leaf : leaves) numbers.push_back(leaf->number());
  const at::Tensor tensor = at::tensor(numbers, at::kDouble).to(dtype);
  if (!tensor.isfinite().all().item<bool>()) {
    throw std::invalid_argument("a number is too large for its dtype");
  }
  return tensor;
}

}  // namespace detail

// Makes a tensor of nested lists; errors call it `field`. Integers are written as whole numbers.
// The inner sizes of an empty list are `sizes`. Throws std::invalid_argument if the lists are not a
// tensor of such numbers.
inline at::Tensor tensor_of(const Json& value, at::ScalarType dtype,
                            const std::vector<int64_t>& sizes, const std::string& field) {
  try {
    std::vector<const Json*> leaves;
    std::vector<int64_t> shape;
    int64_t deepest = -1;
    detail::flatten(value, 0, leaves, shape, deepest);
    if (leaves.empty()) {
      for (size_t dim = shape.size(); dim < sizes.size(); ++dim) shape.push_back(sizes[dim]);
    }
    return detail::leaves_of(leaves, dtype).reshape(shape);
  } catch (const std::exception& error) {
    throw std::invalid_argument(field + ": " + error.what());
  }
}

// Makes a tensor for an input of a model.
inline at::Tensor tensor_of(const Json& value, const Input& input) {
  std::vector<int64_t> sizes;
  for (const auto& size : input.sizes) sizes.push_back(size ? size->plus : 0);
  return tensor_of(value, input.dtype, sizes, "inputs." + input.name);
}

// Throws std::invalid_argument if `owner` is not an object, or has other keys.
inline void check_fields(const Json& value, const std::vector<std::string>& known,
                         const std::string& owner) {
  if (!value.is_object()) throw std::invalid_argument(owner + ": expected an object");
  for (const auto& [key, entry] : value.object()) {
    if (std::find(known.begin(), known.end(), key) != known.end()) continue;
    std::string names;
    for (const std::string& name : known) names += (names.empty() ? "'" : ", '") + name + "'";
    throw std::invalid_argument(owner + " has '" + key + "', expected one of [" + names + "]");
  }
}

// Prints the numbers of a tensor, from first to last, with commas between them. Every float32 and
// float64 is another text. Numbers that JSON lacks, NaN and the infinite ones, are printed as such.
inline void print_numbers(const at::Tensor& tensor, std::ostream& out) {
  const bool is_whole = c10::isIntegralType(tensor.scalar_type(), /*includeBool=*/true);
  const at::Tensor values = tensor.to(is_whole ? at::kLong : at::kDouble).contiguous();
  const auto precision = out.precision(tensor.scalar_type() == at::kDouble ? 17 : 9);
  for (int64_t number = 0; number < values.numel(); ++number) {
    if (number > 0) out << ',';
    if (tensor.scalar_type() == at::kBool) {
      out << (values.const_data_ptr<int64_t>()[number] ? "true" : "false");
    } else if (is_whole) {
      out << values.const_data_ptr<int64_t>()[number];
    } else {
      out << values.const_data_ptr<double>()[number];
    }
  }
  out.precision(precision);
}

// Prints a tensor as nested lists of numbers.
inline void print(const at::Tensor& tensor, std::ostream& out) {
  if (tensor.dim() == 0) return print_numbers(tensor, out);
  out << '[';
  if (tensor.dim() == 1) {
    print_numbers(tensor, out);
    out << ']';
    return;
  }
  for (int64_t row = 0; row < tensor.size(0); ++row) {
    if (row > 0) out << ',';
    print(tensor[row], out);
  }
  out << ']';
}

}  // namespace dynemb::serving
