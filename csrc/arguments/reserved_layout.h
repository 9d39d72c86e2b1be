// The layout of a reserved tensor, on any device.
#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <vector>

namespace dynemb {

struct ReservedLayout {
  torch::headeronly::ScalarType dtype;
  std::vector<int64_t> strides;
  int64_t bytes;
};

// Contiguous. `dtype` is a code of ops/memory.py; raises for others and for sizes beyond the
// address space.
ReservedLayout reserved_layout(const char* op, const std::vector<int64_t>& size, int64_t dtype);

}  // namespace dynemb
