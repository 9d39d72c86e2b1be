// Tags of ops, for code that iterates over them: tests, benchmarks, checks of arguments. torch's
// own tags are a fixed set, and need a newer ABI than that of this library.
#pragma once

#include <torch/csrc/stable/library.h>

#include <string>
#include <vector>

namespace dynemb {

// Where an op runs if it lacks a kernel for some device.
namespace op_tag {
constexpr const char* kHost = "host";    // on tensors of host memory, or without any
constexpr const char* kStore = "store";  // on the host, on the tensors of an open store
constexpr const char* kGpu = "gpu";      // on the memory of a GPU
}  // namespace op_tag

// A name and its tag for each op with a tag.
inline std::vector<std::string>& tagged_ops() {
  static std::vector<std::string> names_and_tags;
  return names_and_tags;
}

// Defines ops with a tag.
class TaggedOps {
 public:
  TaggedOps(torch::stable::detail::StableLibrary& library, const char* tag)
      : library_(library), tag_(tag) {}

  void def(const std::string& schema) {
    library_.def(schema.c_str());
    tagged_ops().push_back(schema.substr(0, schema.find('(')));
    tagged_ops().push_back(tag_);
  }

 private:
  torch::stable::detail::StableLibrary& library_;
  const char* tag_;
};

}  // namespace dynemb
