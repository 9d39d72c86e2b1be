#include "cpu/memory/reserve.h"

#include <sys/mman.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "arguments/reserved_layout.h"
#include "arguments/tensors.h"
#include "core/runtime/available_memory.h"
#include "core/runtime/check.h"
#include "core/runtime/error_class.h"

namespace dynemb::cpu {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Reserved ranges by their first address. madvise is called for these only.
std::mutex ranges_mutex;
std::map<uintptr_t, size_t>& ranges() {
  static auto* map = new std::map<uintptr_t, size_t>();  // outlives tensors freed at exit
  return *map;
}

bool is_reserved(const void* data, size_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(data);
  const std::lock_guard<std::mutex> lock(ranges_mutex);
  auto next = ranges().upper_bound(begin);
  if (next == ranges().begin()) return false;
  --next;
  return begin + bytes <= next->first + next->second;
}

size_t page_size() {
  static const size_t size = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return size;
}

int64_t available_memory_op() { return available_memory(); }

// The first pages stay small, so that a small table does not take huge ones.
constexpr size_t kSmallPages = size_t{4} << 20;

Tensor reserve(std::vector<int64_t> size, int64_t dtype, bool huge_pages) {
  const ReservedLayout layout = reserved_layout("reserve", size, dtype);
  const size_t bytes = std::max<size_t>(static_cast<size_t>(layout.bytes), page_size());
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  DYNEMB_CHECK(data != MAP_FAILED, "dynemb::reserve: could not reserve ", bytes,
               " bytes of address space: ", std::strerror(errno),
               ". Lower max_rows of the tables, or allow overcommit (vm.overcommit_memory 0 or 1)",
               kHostMemoryError);
  madvise(data, bytes, MADV_DONTDUMP);
  if (huge_pages && bytes > kSmallPages) {
    madvise(static_cast<char*>(data) + kSmallPages, bytes - kSmallPages, MADV_HUGEPAGE);
  }
  {
    const std::lock_guard<std::mutex> lock(ranges_mutex);
    ranges()[reinterpret_cast<uintptr_t>(data)] = bytes;
  }
  return torch::stable::from_blob(data, size, layout.strides,
                                  torch::stable::Device(torch::headeronly::DeviceType::CPU),
                                  layout.dtype, [bytes](void* pointer) {
                                    {
                                      const std::lock_guard<std::mutex> lock(ranges_mutex);
                                      ranges().erase(reinterpret_cast<uintptr_t>(pointer));
                                    }
                                    munmap(pointer, bytes);
                                  });
}

// Gives memory of rows [begin, end) back to the system; they read as zeros.
void release_(Tensor tensor, int64_t begin, int64_t end) {
  using torch::headeronly::ScalarType;
  const ScalarType dtype = tensor.scalar_type();
  check_layout("release_", "tensor", tensor, dtype);
  DYNEMB_CHECK(tensor.dim() > 0, "dynemb::release_: tensor has 0 dimensions, expected rows");
  const int64_t rows = tensor.size(0);
  DYNEMB_CHECK(begin >= 0 && begin <= end && end <= rows, "dynemb::release_: rows ", begin, " to ",
               end, " are not a range of the ", rows, " rows of tensor");
  if (begin == end || tensor.numel() == 0) return;
  const auto row_bytes =
      static_cast<size_t>(tensor.numel() / rows) * static_cast<size_t>(tensor.element_size());
  char* data = static_cast<char*>(tensor.data_ptr());
  char* from = data + static_cast<size_t>(begin) * row_bytes;
  char* to = data + static_cast<size_t>(end) * row_bytes;
  const uintptr_t page = page_size();
  char* first =
      reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(from) + page - 1) / page * page);
  char* last = reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(to) / page * page);
  if (first >= last || !is_reserved(data, static_cast<size_t>(rows) * row_bytes)) {
    std::memset(from, 0, static_cast<size_t>(to - from));
    return;
  }
  std::memset(from, 0, static_cast<size_t>(first - from));
  std::memset(last, 0, static_cast<size_t>(to - last));
  madvise(first, static_cast<size_t>(last - first), MADV_DONTNEED);
}

}  // namespace

bool has_available_memory(int64_t bytes) {
  constexpr int64_t kCheckedBytes = int64_t{16} << 20;
  return bytes < kCheckedBytes || bytes <= available_memory();
}

void check_available_memory(const char* op, int64_t bytes) {
  if (has_available_memory(bytes)) return;
  const int64_t available = available_memory();
  DYNEMB_CHECK(false, "dynemb::", op, ": the table must grow by ", bytes >> 20, " MiB, but only ",
               available >> 20,
               " MiB of memory are available; no id was inserted. Erase ids, or use a machine "
               "with more memory",
               kHostMemoryError);
}

void check_result_memory(const char* op, const char* name, int64_t value, int64_t bytes) {
  constexpr int64_t kCheckedBytes = int64_t{256} << 20;
  if (bytes < kCheckedBytes) return;
  const int64_t available = available_memory();
  DYNEMB_CHECK(bytes <= available, "dynemb::", op, ": ", name, " is ", value,
               ", with which the result takes ", bytes, " bytes, but only ", available,
               " bytes of memory are available", kHostMemoryError);
}

void prefer_huge_pages(void* data, size_t bytes) {
  if (!is_reserved(data, bytes)) return;
  const uintptr_t page = page_size();
  const uintptr_t first = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
  const uintptr_t last = (reinterpret_cast<uintptr_t>(data) + bytes) / page * page;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
}

}  // namespace dynemb::cpu

STABLE_TORCH_LIBRARY_IMPL(dynemb, CompositeExplicitAutograd, m) {
  m.impl("reserve", TORCH_BOX(&dynemb::cpu::reserve));
  m.impl("available_memory", TORCH_BOX(&dynemb::cpu::available_memory_op));
}

STABLE_TORCH_LIBRARY_IMPL(dynemb, CPU, m) { m.impl("release_", TORCH_BOX(&dynemb::cpu::release_)); }
