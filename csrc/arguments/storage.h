// Arguments of ops on what files hold, checked.
#pragma once

#include <string>

#include "arguments/tensors.h"

namespace dynemb {

// crc32c: raises unless `data` is contiguous memory of the CPU and `crc` is 32 bits.
void check_summed_bytes(const char* op, const Tensor& data, int64_t crc);

// A path as bytes, uint8 of the CPU. Raises for what no path is: no bytes, or zeros among them.
std::string checked_path(const char* op, const Tensor& path);

// read_blocks: raises unless `offsets` are int64 of the CPU, they and `block_bytes` are multiples
// of a page, and a tensor may be as large as the result.
void check_blocks(const char* op, const Tensor& offsets, int64_t block_bytes);

}  // namespace dynemb
