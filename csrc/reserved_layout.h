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

// Contiguous. `dtype` is 0 (float32), 1 (int32) or 2 (int64); raises for others and for sizes
// beyond the address space.
ReservedLayout reserved_layout(const char* op, const std::vector<int64_t>& size, int64_t dtype);

}  // namespace dynemb
