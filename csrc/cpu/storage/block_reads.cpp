// Ops that read blocks of a file, for tests and measurements of both ways of reading.
#include <fcntl.h>
#include <sys/stat.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "arguments/storage.h"
#include "core/runtime/check.h"
#include "core/runtime/error_class.h"
#include "cpu/runtime/results.h"
#include "cpu/storage/block_io.h"

namespace dynemb::cpu {
namespace {

class OpenFile {
 public:
  // Past the page cache if the file system allows it.
  explicit OpenFile(const std::string& path) : descriptor_(open_with(path, O_DIRECT)) {
    if (descriptor_ < 0 && errno == EINVAL) descriptor_ = open_with(path, 0);
    check(descriptor_ >= 0, path, std::strerror(errno));
    struct stat status{};
    const bool is_file = fstat(descriptor_, &status) == 0 && S_ISREG(status.st_mode);
    if (!is_file) close(descriptor_);
    check(is_file, path, "it is not a file");
  }
  ~OpenFile() { close(descriptor_); }
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;

  int descriptor() const { return descriptor_; }

 private:
  static int open_with(const std::string& path, int flag) {
    return open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | flag);
  }
  static void check(bool is_right, const std::string& path, const char* what) {
    DYNEMB_CHECK(is_right, "dynemb::read_blocks: cannot open ", path, ": ", what);
  }

  int descriptor_;
};

// Memory that begins at a page.
Tensor empty_pages(int64_t blocks, int64_t block_bytes) {
  if (blocks == 0) return empty_cpu({0, block_bytes}, ScalarType::Byte);
  const size_t bytes = static_cast<size_t>(blocks) * static_cast<size_t>(block_bytes);
  void* data = std::aligned_alloc(kPageBytes, bytes);
  DYNEMB_CHECK(data != nullptr, "dynemb::read_blocks: out of memory for ", blocks, " blocks of ",
               block_bytes, " bytes: read fewer at a time", kHostMemoryError);
  return torch::stable::from_blob(data, {blocks, block_bytes}, {block_bytes, 1},
                                  torch::stable::Device(torch::headeronly::DeviceType::CPU),
                                  ScalarType::Byte, [](void* pointer) { std::free(pointer); });
}

Tensor read_blocks(Tensor path, Tensor offsets, int64_t block_bytes, int64_t io) {
  const std::string file_path = checked_path("read_blocks", path);
  check_blocks("read_blocks", offsets, block_bytes);
  DYNEMB_CHECK(io >= 0 && io < kIoPaths, "dynemb::read_blocks: io is ", io,
               ", expected 0 (auto), 1 (uring) or 2 (threads)");
  const auto reader = block_reader(static_cast<IoPath>(io));
  const OpenFile file(file_path);
  const int64_t count = offsets.numel();
  const auto* offset = static_cast<const int64_t*>(offsets.data_ptr());
  Tensor result = empty_pages(count, block_bytes);
  auto* to = static_cast<char*>(result.data_ptr());
  std::vector<BlockRead> blocks;
  blocks.reserve(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    blocks.push_back({file.descriptor(), offset[i], to + i * block_bytes, block_bytes});
  }
  const std::vector<BlockFailure> failures = reader->read(blocks, [](size_t) {});
  DYNEMB_CHECK(failures.empty(), "dynemb::read_blocks: ", failures.size(), " of ", count,
               " blocks of ", file_path, " cannot be read; the first one is at offset ",
               offset[failures[0].block], ": ",
               failures[0].error == 0 ? "the file ends before the block does"
                                      : std::strerror(failures[0].error));
  return result;
}

std::vector<int64_t> store_io_paths() {
  std::vector<int64_t> paths;
  if (has_uring()) paths.push_back(static_cast<int64_t>(IoPath::kUring));
  paths.push_back(static_cast<int64_t>(IoPath::kThreads));
  return paths;
}

}  // namespace
}  // namespace dynemb::cpu

STABLE_TORCH_LIBRARY_IMPL(dynemb, CompositeExplicitAutograd, m) {
  m.impl("store_io_paths", TORCH_BOX(&dynemb::cpu::store_io_paths));
}

STABLE_TORCH_LIBRARY_IMPL(dynemb, CPU, m) {
  m.impl("read_blocks", TORCH_BOX(&dynemb::cpu::read_blocks));
}

// For error messages about a GPU's tensor, also in builds without CUDA kernels.
STABLE_TORCH_LIBRARY_IMPL(dynemb, CUDA, m) {
  m.impl("read_blocks", TORCH_BOX(&dynemb::cpu::read_blocks));
}
