// Tensors of the nested lists of a JSON request, which simdjson parses, and back.

#pragma once

#include <ATen/Tensor.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/tensor.h>
#include <simdjson.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <ostream>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "serving/model.h"

namespace json_tensors {

using simdjson::dom::element;
using simdjson::dom::object;

// A parsed text. Its parser takes memory in proportion to the text: at most 14 bytes a byte.
class Document {
 public:
  // Parses the first `length` bytes of a text. Throws std::invalid_argument if they are not JSON.
  Document(const std::string& text, size_t length) {
    const bool has_padding = text.capacity() - length >= simdjson::SIMDJSON_PADDING;
    const auto error = parser_.parse(text.data(), length, !has_padding).get(root_);
    if (!error) return;
    std::string why = simdjson::error_message(error);
    if (error == simdjson::NUMBER_ERROR) {
      why += "; integers have at most 64 bits, and other numbers are below 1.8e308";
    }
    throw std::invalid_argument("JSON: " + why);
  }
  explicit Document(const std::string& text) : Document(text, text.size()) {}

  element root() const { return root_; }

 private:
  simdjson::dom::parser parser_;
  element root_;
};

// The field of an object; none: it lacks it.
inline std::optional<element> field(const object& fields, std::string_view key) {
  element value;
  return fields.at_key(key).get(value) ? std::nullopt : std::optional(value);
}

// Throws std::invalid_argument if `value` is not an object, or has a key twice.
inline object object_of(const std::optional<element>& value, const std::string& owner) {
  object fields;
  if (!value || value->get(fields)) throw std::invalid_argument(owner + ": expected an object");
  std::set<std::string_view> keys;
  for (const auto& entry : fields) {
    if (keys.insert(entry.key).second) continue;
    throw std::invalid_argument(owner + " has '" + std::string(entry.key) + "' twice");
  }
  return fields;
}

// An object without other keys than those that are known. Throws std::invalid_argument.
inline object fields_of(const std::optional<element>& value, const std::vector<std::string>& known,
                        const std::string& owner) {
  const object fields = object_of(value, owner);
  for (const auto& entry : fields) {
    if (std::find(known.begin(), known.end(), entry.key) != known.end()) continue;
    std::string names;
    for (const std::string& name : known) names += (names.empty() ? "'" : ", '") + name + "'";
    throw std::invalid_argument(owner + " has '" + std::string(entry.key) + "', expected one of [" +
                                names + "]");
  }
  return fields;
}

namespace detail {

// Appends the numbers of nested lists, read as `Value`, and the shape at depth `depth`; `deepest`
// is the depth of the numbers, -1 before the first one.
template <typename Value, typename Number>
void flatten(const element& value, const char* expected, int64_t depth,
             std::vector<Number>& numbers, std::vector<int64_t>& shape, int64_t& deepest) {
  const auto levels = static_cast<int64_t>(shape.size());
  simdjson::dom::array parts;
  if (value.get(parts)) {
    if (deepest < 0) deepest = depth;
    if (depth != deepest || depth != levels) {
      throw std::invalid_argument("lists of a tensor differ in depth");
    }
    Value number;
    if (value.get(number)) throw std::invalid_argument(std::string("expected ") + expected);
    return numbers.push_back(number);
  }
  if (depth == deepest) throw std::invalid_argument("lists of a tensor differ in depth");
  int64_t length = 0;
  if (levels == depth) shape.push_back(-1);  // until its first list has been read
  const auto check = [&](bool fits) {
    if (!fits) throw std::invalid_argument("lists of a tensor differ in length");
  };
  for (const element part : parts) {
    check(shape[depth] < 0 || length < shape[depth]);
    flatten<Value>(part, expected, depth + 1, numbers, shape, deepest);
    ++length;
  }
  check(shape[depth] < 0 || length == shape[depth]);
  shape[depth] = length;
}

template <typename Value, typename Number = Value>
at::Tensor flat_tensor(const element& value, const char* expected, std::vector<int64_t>& shape) {
  std::vector<Number> numbers;
  int64_t deepest = -1;
  flatten<Value>(value, expected, 0, numbers, shape, deepest);
  return at::tensor(numbers);
}

inline at::Tensor tensor_of(const element& value, at::ScalarType dtype,
                            std::vector<int64_t>& shape) {
  if (dtype == at::kBool) {
    return flat_tensor<bool, uint8_t>(value, "true or false", shape).to(dtype);
  }
  if (c10::isIntegralType(dtype, false)) {
    const at::Tensor whole = flat_tensor<int64_t>(value, "a whole number of 64 bits", shape);
    const at::Tensor tensor = whole.to(dtype);
    if (dtype != at::kLong && !tensor.to(at::kLong).equal(whole)) {
      throw std::invalid_argument("expected a whole number of " +
                                  std::to_string(8 * tensor.element_size()) + " bits");
    }
    return tensor;
  }
  const at::Tensor tensor = flat_tensor<double>(value, "a number", shape).to(dtype);
  if (!tensor.isfinite().all().item<bool>()) {
    throw std::invalid_argument("a number is too large for its dtype");
  }
  return tensor;
}

}  // namespace detail

// Makes a tensor of nested lists; errors call it `field`. Integers are written as whole numbers.
// The inner sizes of an empty list are `sizes`. Throws std::invalid_argument if the lists are not a
// tensor of such numbers.
inline at::Tensor tensor_of(const element& value, at::ScalarType dtype,
                            const std::vector<int64_t>& sizes, const std::string& field) {
  try {
    std::vector<int64_t> shape;
    const at::Tensor numbers = detail::tensor_of(value, dtype, shape);
    if (numbers.numel() == 0) {
      for (size_t dim = shape.size(); dim < sizes.size(); ++dim) shape.push_back(sizes[dim]);
    }
    return numbers.reshape(shape);
  } catch (const std::exception& error) {
    throw std::invalid_argument(field + ": " + error.what());
  }
}

// Makes a tensor for an input of a model.
inline at::Tensor tensor_of(const element& value, const dynemb::serving::Input& input) {
  std::vector<int64_t> sizes;
  for (const auto& size : input.sizes) sizes.push_back(size ? size->plus : 0);
  return tensor_of(value, input.dtype, sizes, "inputs." + input.name);
}

// Prints the numbers of a tensor, from first to last, with commas between them. Every float32 and
// float64 is another text. Throws std::invalid_argument for NaN and the infinite numbers, which
// JSON lacks; the error calls the tensor `field`.
inline void print_numbers(const at::Tensor& tensor, const std::string& field, std::ostream& out) {
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
      const double value = values.const_data_ptr<double>()[number];
      if (!std::isfinite(value)) {
        throw std::invalid_argument(field +
                                    ": it has a number that JSON lacks, NaN or infinite: ask for "
                                    "binary_data by the Open Inference Protocol");
      }
      out << value;
    }
  }
  out.precision(precision);
}

// Prints a tensor as nested lists of numbers, by the rules of print_numbers.
inline void print(const at::Tensor& tensor, const std::string& field, std::ostream& out) {
  if (tensor.dim() == 0) return print_numbers(tensor, field, out);
  out << '[';
  if (tensor.dim() == 1) {
    print_numbers(tensor, field, out);
    out << ']';
    return;
  }
  for (int64_t row = 0; row < tensor.size(0); ++row) {
    if (row > 0) out << ',';
    print(tensor[row], field, out);
  }
  out << ']';
}

}  // namespace json_tensors
