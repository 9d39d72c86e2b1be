#include "arguments/reserved_layout.h"

#include "core/runtime/check.h"

namespace dynemb {

using torch::headeronly::ScalarType;

ReservedLayout reserved_layout(const char* op, const std::vector<int64_t>& size, int64_t dtype) {
  constexpr ScalarType kTypes[] = {ScalarType::Float,    ScalarType::Int,  ScalarType::Long,
                                   ScalarType::BFloat16, ScalarType::Half, ScalarType::Byte};
  constexpr int64_t kBytes[] = {4, 4, 8, 2, 2, 1};
  DYNEMB_CHECK(dtype >= 0 && dtype <= 5, "dynemb::", op, ": dtype is ", dtype,
               ", expected 0 (float32), 1 (int32), 2 (int64), 3 (bfloat16), 4 (float16) or 5 "
               "(uint8)");
  ReservedLayout layout{kTypes[dtype], std::vector<int64_t>(size.size()), 0};
  int64_t numel = 1;
  for (size_t i = size.size(); i-- > 0;) {
    DYNEMB_CHECK(size[i] >= 0 && (size[i] == 0 || numel <= (int64_t{1} << 47) / size[i]),
                 "dynemb::", op, ": size[", i, "] is ", size[i],
                 ": the tensor would exceed the address space");
    layout.strides[i] = numel;
    numel *= size[i];
  }
  layout.bytes = numel * kBytes[dtype];
  return layout;
}

}  // namespace dynemb
