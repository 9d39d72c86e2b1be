// Prefetches of rows and records.
#pragma once

#include <algorithm>
#include <cstdint>

namespace dynemb::cpu {

// The processor reads on by itself from here.
constexpr int64_t kPrefetchedBytes = 1024;

inline void prefetch_bytes(const char* data, int64_t bytes) {
  constexpr int64_t kLine = 64;
  const int64_t end = std::min(bytes, kPrefetchedBytes);
  for (int64_t i = 0; i < end; i += kLine) __builtin_prefetch(data + i);
}

}  // namespace dynemb::cpu
