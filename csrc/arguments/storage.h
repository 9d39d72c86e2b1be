// Arguments of ops on what files hold, checked.
#pragma once

#include "arguments/tensors.h"

namespace dynemb {

// crc32c: raises unless `data` is contiguous memory of the CPU and `crc` is 32 bits.
void check_summed_bytes(const char* op, const Tensor& data, int64_t crc);

}  // namespace dynemb
