// Reads of blocks by io_uring: the kernel takes a queue of them, and no thread waits for each.
#pragma once

#include <memory>

#include "cpu/storage/block_io.h"

namespace dynemb::cpu {

#if defined(DYNEMB_HAS_URING)
constexpr bool kBuiltWithUring = true;
#else
constexpr bool kBuiltWithUring = false;
#endif

// Whether the kernel makes a ring and knows its reads. Raises if something else is missing, such as
// descriptors.
bool uring_is_allowed();
// Requires uring_is_allowed().
std::unique_ptr<BlockReader> uring_reader();

}  // namespace dynemb::cpu
