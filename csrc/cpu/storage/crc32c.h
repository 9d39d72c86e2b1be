// The checksum of all files.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dynemb::cpu {

// CRC-32C of `bytes` bytes at `data`, of any alignment, continuing from the checksum `crc` of
// preceding bytes (0: none). Runs on one thread.
uint32_t crc32c(uint32_t crc, const void* data, size_t bytes);

}  // namespace dynemb::cpu
