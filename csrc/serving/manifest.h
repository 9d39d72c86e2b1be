// The manifest of a serving package; see torch_dynemb/serving/packages/manifest.py.

#pragma once

#include <ATen/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <sys/utsname.h>
#include <torch/version.h>

#include <fstream>
#include <iterator>
#include <optional>
#include <set>
#include <sstream>
#include <string>

#include "serving/json.h"
#include "serving/ops.h"

namespace dynemb::serving {

namespace detail {

[[noreturn]] inline void damaged(const std::string& file, const std::string& why) {
  throw std::runtime_error(file + ": " + why);
}

// CRC-32C of bytes, continuing from the checksum `before` of preceding bytes.
inline uint32_t crc32c(const void* data, size_t bytes, uint32_t before = 0) {
  const at::Tensor values =
      at::from_blob(const_cast<void*>(data), {static_cast<int64_t>(bytes)}, at::kByte);
  const at::Tensor sum = call("dynemb::crc32c", values, static_cast<int64_t>(before)).toTensor();
  return static_cast<uint32_t>(*sum.const_data_ptr<int64_t>());
}

inline std::string series(const std::string& version) {
  return version.substr(0, version.find('.', version.find('.') + 1));
}

inline std::set<std::string> instruction_sets() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("flags", 0) != 0 && line.rfind("Features", 0) != 0) continue;
    std::istringstream words(line.substr(line.find(':') + 1));
    return {std::istream_iterator<std::string>(words), {}};
  }
  return {};
}

}  // namespace detail

// The manifest of a package, checked against its checksum.
inline Json read_manifest(const std::string& folder) {
  constexpr size_t kEnd = 22;  // ,"crc32c":"01234567"} and a line feed
  // formats of packages that are read-only, that have a base in a delta log, and that have rows to
  // update
  constexpr int64_t kFormatVersion = 1;  // FORMAT_VERSION in serving/packages/manifest.py
  const std::string path = folder + "/manifest.json";
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    throw std::runtime_error("Model: " + folder +
                             " is not a serving package: it has no manifest.json; "
                             "torch_dynemb.serving.export makes one");
  }
  constexpr std::streamoff kMostBytes = std::streamoff{16} << 20;  // of a package of 10 TB
  file.seekg(0, std::ios::end);
  if (const std::streamoff bytes = file.tellg(); bytes > kMostBytes) {
    detail::damaged(
        path, "the file has " + std::to_string(bytes) + " bytes, more than the largest manifest");
  }
  file.seekg(0);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  Json manifest;
  try {
    manifest = Json::parse(text);
    if (manifest.at("format").text() != "torch_dynemb serving package") {
      detail::damaged(path, "the file is not the manifest of a serving package");
    }
    if (manifest.at("format_version").integer() != kFormatVersion) {
      throw std::runtime_error(
          "the package has another format version than this program reads: "
          "export the model again");
    }
  } catch (const std::runtime_error& error) {
    detail::damaged(path, error.what());
  }
  char expected[kEnd + 1] = {};
  const size_t body = text.size() - std::min(text.size(), kEnd);
  std::snprintf(expected, sizeof expected, ",\"crc32c\":\"%08x\"}\n",
                detail::crc32c(text.data(), body));
  if (text.substr(body) != expected) {
    detail::damaged(path, "the checksum is wrong: the file was damaged or edited");
  }
  return manifest;
}

// Throws std::runtime_error if the code of a package cannot run in this process.
inline void check_platform(const std::string& folder, const Json& manifest) {
  const auto refuse = [&](const std::string& what) {
    throw std::runtime_error("Model: " + folder + " was exported " + what +
                             ": export the model again for this program and machine");
  };
  const std::string torch = manifest.at("torch").text();
  if (detail::series(torch) != detail::series(TORCH_VERSION)) {
    refuse("with torch " + torch + ", but this program has torch " TORCH_VERSION);
  }
  utsname system{};
  uname(&system);
  if (manifest.at("machine").text() != system.machine) {
    refuse("for " + manifest.at("machine").text() + ", but this machine is " + system.machine);
  }
  const auto present = detail::instruction_sets();
  for (const Json& instruction : manifest.at("instructions").array()) {
    if (present.count(instruction.text()) == 0) {
      refuse("for a processor that has " + instruction.text() + ", which this one lacks");
    }
  }
  if (manifest.at("device").text() != "cpu") {
    refuse("for " + manifest.at("device").text() + ", but this reader serves on the CPU");
  }
  for (const auto& [name, schema] : manifest.at("ops").object()) {
    const std::string found = toString(detail::op(name).schema());
    if (found != schema.text()) {
      refuse("with torch_dynemb " + manifest.at("library").text() + " and calls " + schema.text() +
             ", which the loaded library has as " + found);
    }
  }
}

}  // namespace dynemb::serving
