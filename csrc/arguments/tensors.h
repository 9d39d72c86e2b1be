// Checks for arguments of any kind, on all devices.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "core/runtime/check.h"

namespace dynemb {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The op of a call, for messages, and the device that its tensors have to be on: the CPU, or one
// GPU.
struct CallContext {
  static constexpr int32_t kOnCpu = -1;

  const char* op;
  int32_t gpu;  // its number, or kOnCpu

  // For an op of the CPU.
  CallContext(const char* op) : CallContext(op, kOnCpu) {}
  CallContext(const char* op, int32_t gpu) : op(op), gpu(gpu) {}

  bool has(const Tensor& tensor) const {  // whether the tensor is on the right device
    if (gpu == kOnCpu) return tensor.is_cpu();
    return tensor.is_cuda() && tensor.get_device_index() == gpu;
  }
};

// As in Python, without "torch.".
const char* dtype_name(ScalarType dtype);
// Device of a tensor: "the CPU", "cuda:0", "another device".
std::string device_name(const Tensor& tensor);

// Raises if the tensor is undefined: lists may have None in place of one.
void check_defined(const char* op, const char* name, const Tensor& tensor);
void check_defined(const char* op, const char* name, size_t i, const Tensor& tensor);
// Raises unless `tensor` is contiguous and of the dtype.
void check_layout(const char* op, const char* name, const Tensor& tensor, ScalarType dtype);
// Raises unless `tensor` is on the right device, contiguous and of the dtype.
void check_tensor(const CallContext& call, const char* name, const Tensor& tensor,
                  ScalarType dtype);
// Raises unless `tensor` is a vector of `expected` elements.
void check_length(const char* op, const char* name, const Tensor& tensor, int64_t expected);
// Raises unless size(dim) of a matrix, or of a vector where `dim` is 0, is `expected`.
void check_size(const char* op, const char* name, const Tensor& tensor, int64_t dim,
                int64_t expected);
// Raises unless `tensor` is a vector of int64; otherwise like check_tensor.
void check_words(const CallContext& call, const char* name, const Tensor& tensor);
// "name[i]": an entry of a list, in messages.
std::string entry_name(const char* name, size_t i);
// Raises unless `list` is not empty and has an entry for each of `features`.
void check_entries(const char* op, const char* name, size_t entries, size_t features);
// Raises for a tensor of `list` that is on the wrong device.
void check_devices(const CallContext& call, const char* name, const std::vector<Tensor>& list);
// Raises unless `list` has a contiguous tensor of the dtype for each feature, on the right device,
// of `dims` dimensions (kAnyDims: any).
constexpr int64_t kAnyDims = -1;
void check_list(const CallContext& call, const char* name, const std::vector<Tensor>& list,
                size_t features, ScalarType dtype, int64_t dims);
// The bytes of a result of `sizes`, one of which argument `name` has set to `value`, with
// `value_bytes` for each element. Raises if a size is negative or the result exceeds the address
// space.
int64_t result_bytes(const char* op, const char* name, int64_t value,
                     const std::vector<int64_t>& sizes, int64_t value_bytes);

}  // namespace dynemb
