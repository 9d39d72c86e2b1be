#include "cpu/runtime/results.h"

#include <sys/mman.h>
#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/util/Exception.h>
#include <unistd.h>

#include <exception>
#include <string>

namespace dynemb::cpu {
namespace {

// malloc takes tensors of this size from the system afresh and gives them back when they are freed,
// so that every 4 KiB of them are a page fault: several times the cost of writing them once.
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

}  // namespace

Tensor empty_cpu(const std::vector<int64_t>& size, ScalarType dtype) {
  try {
    Tensor tensor = torch::stable::empty(size, dtype, std::nullopt,
                                         torch::stable::Device(torch::headeronly::DeviceType::CPU));
    prefer_huge_pages_if_large(tensor);
    return tensor;
  } catch (const std::exception&) {  // whose text is that of a call within this library
    std::string shape;
    for (const int64_t length : size) shape += (shape.empty() ? "" : ", ") + std::to_string(length);
    STD_TORCH_CHECK(false, "dynemb::empty: there is no memory for a result of shape [", shape,
                    "]: give fewer ids, or smaller sizes");
  }
}

Tensor zeros_cpu(const std::vector<int64_t>& size, ScalarType dtype) {
  Tensor tensor = empty_cpu(size, dtype);
  return torch::stable::zero_(tensor);
}

}  // namespace dynemb::cpu
