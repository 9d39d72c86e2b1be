// Reader of headers of safetensors files.

#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "serving/json.h"

namespace dynemb::serving::detail {

inline at::ScalarType dtype_of(const std::string& name) {
  static const std::unordered_map<std::string, at::ScalarType> kTypes = {
      {"F64", at::kDouble},
      {"F32", at::kFloat},
      {"F16", at::kHalf},
      {"BF16", at::kBFloat16},
      {"F8_E4M3", at::kFloat8_e4m3fn},
      {"F8_E5M2", at::kFloat8_e5m2},
      {"I64", at::kLong},
      {"I32", at::kInt},
      {"I16", at::kShort},
      {"I8", at::kChar},
      {"U8", at::kByte},
      {"BOOL", at::kBool},
  };
  const auto found = kTypes.find(name);
  if (found == kTypes.end()) throw std::runtime_error("unknown dtype " + name);
  return found->second;
}

// A tensor of a file, and the position of its values.
struct Section {
  std::string name;
  at::ScalarType dtype;
  std::vector<int64_t> shape;
  size_t begin, bytes;
};

// The bytes of a header, including its length, in a file of so many bytes. `first`: the length
// field.
inline size_t header_bytes(const char* first, size_t file_bytes) {
  uint64_t length = 0;
  if (file_bytes < sizeof length) throw std::runtime_error("it has no header");
  std::memcpy(&length, first, sizeof length);
  constexpr uint64_t kMost = uint64_t{16} << 20;  // for a hundred thousand tensors
  if (length > std::min<uint64_t>(kMost, file_bytes - sizeof length)) {
    throw std::runtime_error("its header is too long");
  }
  return sizeof length + static_cast<size_t>(length);
}

// Bytes of a tensor; none: a size is negative, or the product too large.
inline std::optional<size_t> bytes_of(const std::vector<int64_t>& shape, size_t element) {
  size_t bytes = element;
  bool fits = true;
  for (const int64_t size : shape) {
    // a tensor without values has sizes, too; their product must be a number
    const auto factor = static_cast<size_t>(std::max<int64_t>(1, size));
    fits = fits && size >= 0 && !__builtin_mul_overflow(bytes, factor, &bytes);
  }
  if (!fits || bytes >= size_t{1} << 62) return {};
  return std::count(shape.begin(), shape.end(), 0) > 0 ? 0 : bytes;
}

// The tensors of a header. Throws std::runtime_error if they do not fit the file.
inline std::vector<Section> sections_in(const std::string& text, size_t header, size_t file_bytes) {
  std::vector<Section> result;
  size_t together = 0;  // tensors do not overlap, so copies of all are no larger than the file
  const Json parsed = Json::parse(text);
  for (const auto& [name, entry] : parsed.object()) {
    if (name == "__metadata__") continue;
    Section section{name, dtype_of(entry.at("dtype").text()), {}, 0, 0};
    for (const Json& size : entry.at("shape").array()) section.shape.push_back(size.integer());
    const auto bytes = bytes_of(section.shape, c10::elementSize(section.dtype));
    const Json::Array& offsets = entry.at("data_offsets").array();
    const int64_t first = offsets.at(0).integer(), last = offsets.at(1).integer();
    const auto room = static_cast<int64_t>(file_bytes - header);
    if (first < 0 || last < first || last > room || bytes != static_cast<size_t>(last - first) ||
        together + *bytes > file_bytes) {
      throw std::runtime_error(name + " does not fit the file");
    }
    section.begin = header + static_cast<size_t>(first);
    section.bytes = *bytes, together += *bytes;
    result.push_back(std::move(section));
  }
  return result;
}

}  // namespace dynemb::serving::detail
