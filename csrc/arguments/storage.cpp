#include "arguments/storage.h"

#include "core/storage/record.h"

namespace dynemb {
namespace {

// Of the CPU, since files are read to host memory.
void check_in_host_memory(const char* op, const char* name, const Tensor& tensor) {
  check_defined(op, name, tensor);
  STD_TORCH_CHECK(tensor.is_cpu(), "dynemb::", op, ": ", name, " is on ", device_name(tensor),
                  ", but ", op, " reads files to host memory: copy to the CPU first, with .cpu()");
}

}  // namespace

void check_summed_bytes(const char* op, const Tensor& data, int64_t crc) {
  check_defined(op, "data", data);
  STD_TORCH_CHECK(data.is_cpu(), "dynemb::", op, ": data is on ", device_name(data), ", but ", op,
                  " sums bytes in host memory: copy to the CPU first, with .cpu()");
  STD_TORCH_CHECK(data.is_contiguous(), "dynemb::", op,
                  ": data is not contiguous: call .contiguous()");
  STD_TORCH_CHECK(crc >= 0 && crc <= UINT32_MAX, "dynemb::", op, ": crc is ", crc,
                  ", expected 0 to ", UINT32_MAX, ", the sum so far");
}

std::string checked_path(const char* op, const Tensor& path) {
  check_in_host_memory(op, "path", path);
  check_layout(op, "path", path, ScalarType::Byte);
  STD_TORCH_CHECK(path.dim() == 1, "dynemb::", op, ": path has ", path.dim(),
                  " dimensions, expected 1");
  std::string text(static_cast<const char*>(path.data_ptr()), static_cast<size_t>(path.numel()));
  STD_TORCH_CHECK(!text.empty(), "dynemb::", op, ": path is empty, expected the bytes of a path");
  STD_TORCH_CHECK(text.find('\0') == std::string::npos, "dynemb::", op, ": path has a zero at ",
                  text.find('\0'), ", which no path has");
  return text;
}

void check_blocks(const char* op, const Tensor& offsets, int64_t block_bytes) {
  check_in_host_memory(op, "offsets", offsets);
  check_words(op, "offsets", offsets);
  STD_TORCH_CHECK(block_bytes > 0 && block_bytes % kPageBytes == 0, "dynemb::", op,
                  ": block_bytes is ", block_bytes, ", expected a multiple of ", kPageBytes);
  const int64_t count = offsets.numel();
  const auto* offset = static_cast<const int64_t*>(offsets.data_ptr());
  for (int64_t i = 0; i < count; ++i) {
    STD_TORCH_CHECK(offset[i] >= 0 && offset[i] % kPageBytes == 0, "dynemb::", op, ": offsets[", i,
                    "] is ", offset[i], ", expected a multiple of ", kPageBytes);
  }
  result_bytes(op, "block_bytes", block_bytes, {count, block_bytes}, 1);
}

}  // namespace dynemb
