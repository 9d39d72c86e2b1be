// Tensors for results.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <vector>

#include "arguments/tensors.h"

namespace dynemb::cpu {

Tensor empty_cpu(const std::vector<int64_t>& size, ScalarType dtype);
Tensor zeros_cpu(const std::vector<int64_t>& size, ScalarType dtype);

}  // namespace dynemb::cpu
