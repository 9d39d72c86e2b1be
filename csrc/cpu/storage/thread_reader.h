// Reads of blocks by pread on threads, for kernels and builds without io_uring.
#pragma once

#include <memory>

#include "cpu/storage/block_io.h"

namespace dynemb::cpu {

// Its threads start at the first read of more than one block, and sleep between reads.
std::unique_ptr<BlockReader> thread_reader();

}  // namespace dynemb::cpu
