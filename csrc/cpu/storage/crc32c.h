// The checksum of everything that is written to files.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dynemb::cpu {

// crc32c of `bytes` bytes at `data`, of any alignment, after others whose crc32c is `crc`: 0 where
// there are none. By one thread.
uint32_t crc32c(uint32_t crc, const void* data, size_t bytes);

}  // namespace dynemb::cpu
