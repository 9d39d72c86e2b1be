// Reads headers of safetensors files.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstring>
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

// A tensor of a file, and where its values lie there.
struct Section {
  std::string name;
  at::ScalarType dtype;
  std::vector<int64_t> shape;
  size_t begin, bytes;
};

// The bytes of a header, its length included, of a file of so many bytes. `first` is the length as
// the file has it.
inline size_t header_bytes(const char* first, size_t file_bytes) {
  uint64_t length = 0;
  if (file_bytes < sizeof length) throw std::runtime_error("it has no header");
  std::memcpy(&length, first, sizeof length);
  if (length > file_bytes - sizeof length) throw std::runtime_error("its header is too long");
  return sizeof length + static_cast<size_t>(length);
}

// The tensors that a header tells of. Throws std::runtime_error where they do not fit the file.
inline std::vector<Section> sections_in(const std::string& text, size_t header, size_t file_bytes) {
  std::vector<Section> result;
  const Json parsed = Json::parse(text);
  for (const auto& [name, entry] : parsed.object()) {
    if (name == "__metadata__") continue;
    Section section{name, dtype_of(entry.at("dtype").text()), {}, 0, 0};
    size_t bytes = c10::elementSize(section.dtype);
    for (const Json& size : entry.at("shape").array()) {
      section.shape.push_back(size.integer());
      bytes *= static_cast<size_t>(size.integer());
    }
    const Json::Array& offsets = entry.at("data_offsets").array();
    section.begin = header + static_cast<size_t>(offsets.at(0).integer());
    section.bytes = static_cast<size_t>(offsets.at(1).integer() - offsets.at(0).integer());
    if (section.bytes != bytes || section.begin > file_bytes ||
        bytes > file_bytes - section.begin) {
      throw std::runtime_error(name + " does not fit the file");
    }
    result.push_back(std::move(section));
  }
  return result;
}

}  // namespace dynemb::serving::detail
