#include "cpu/runtime/results.h"

#include <sys/mman.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/stableivalue_conversions.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <string>

#include "core/runtime/check.h"
#include "core/runtime/error_class.h"

namespace dynemb::cpu {
namespace {

// For tensors of this size malloc takes new memory from the system and gives it back when they are
// freed, so every 4 KiB of them are a page fault: several times the cost of writing them once.
constexpr size_t kHugePagesFrom = size_t{16} << 20;

void prefer_huge_pages_if_large(const Tensor& tensor) {
  const size_t bytes = static_cast<size_t>(tensor.numel()) * tensor.element_size();
  if (bytes < kHugePagesFrom) return;
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<uintptr_t>(tensor.data_ptr());
  const uintptr_t first = (begin + page - 1) / page * page;
  const uintptr_t last = (begin + bytes) / page * page;
  madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);  // advice: may fail
}

// torch::stable::empty looks its op up by name and boxes the arguments on every call, which takes
// longer than a whole small lookup.
Tensor contiguous_tensor(const std::vector<int64_t>& size, ScalarType dtype) {
  constexpr size_t kMostDims = 8;
  int64_t strides[kMostDims];
  DYNEMB_CHECK(size.size() <= kMostDims, "dynemb::empty: ", size.size(), " dimensions");
  int64_t stride = 1;
  for (size_t d = size.size(); d-- > 0;) {
    strides[d] = stride;
    DYNEMB_CHECK(!__builtin_mul_overflow(stride, std::max<int64_t>(size[d], 1), &stride),
                 "dynemb::empty: too large");
  }
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      static_cast<int64_t>(size.size()), size.data(), strides,
      torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype)),
      aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

// Larger ones are zeroed by all threads.
constexpr int64_t kZeroedHere = 1 << 14;

}  // namespace

Tensor empty_cpu(const std::vector<int64_t>& size, ScalarType dtype) {
  try {
    Tensor tensor = contiguous_tensor(size, dtype);
    prefer_huge_pages_if_large(tensor);
    return tensor;
  } catch (const std::exception&) {  // its text is about a call within this library
    std::string shape;
    for (const int64_t length : size) shape += (shape.empty() ? "" : ", ") + std::to_string(length);
    DYNEMB_CHECK(false, "dynemb::empty: out of memory for a result of shape [", shape,
                 "]: give fewer ids, or smaller sizes", kHostMemoryError);
  }
}

Tensor zeros_cpu(const std::vector<int64_t>& size, ScalarType dtype) {
  Tensor tensor = empty_cpu(size, dtype);
  const int64_t bytes = tensor.numel() * static_cast<int64_t>(tensor.element_size());
  if (bytes > kZeroedHere) return torch::stable::zero_(tensor);
  if (bytes > 0) std::memset(tensor.data_ptr(), 0, static_cast<size_t>(bytes));
  return tensor;
}

}  // namespace dynemb::cpu
