#include "cpu/rows/state.h"

namespace dynemb::cpu {

std::vector<SlabState> slab_state(const char* op, const std::vector<Tensor>& weights,
                                  const std::vector<Tensor>& state) {
  const size_t slabs = weights.size();
  STD_TORCH_CHECK(slabs > 0 && state.size() % slabs == 0, "dynemb::", op, ": state has ",
                  state.size(), " tensors, expected a multiple of the ", slabs, " slabs");
  std::vector<SlabState> result(slabs);
  for (size_t i = 0; i < state.size(); ++i) {
    SlabState& slab = result[i % slabs];
    const Tensor& tensor = state[i];
    const Tensor& rows = weights[i % slabs];
    const int64_t dim = rows.size(1);
    check_defined(op, "state", tensor);
    const ScalarType type = tensor.scalar_type();
    check_size(op, "state", tensor, 0, rows.size(0));
    if (tensor.dim() == 1 && type == ScalarType::Int) {
      check_tensor(op, "state", tensor, ScalarType::Int);
      STD_TORCH_CHECK(slab.steps == nullptr, "dynemb::", op, ": state of slab ", i % slabs,
                      " has two tensors of steps");
      slab.steps = static_cast<int32_t*>(tensor.data_ptr());
      continue;
    }
    if (tensor.dim() == 1) {
      check_tensor(op, "state", tensor, ScalarType::Float);
      STD_TORCH_CHECK(slab.row_states < kMaxStates, "dynemb::", op, ": state of slab ", i % slabs,
                      " has more than ", kMaxStates, " values per row");
      slab.of_row[slab.row_states++] = static_cast<float*>(tensor.data_ptr());
      continue;
    }
    const int k = slab.element_states++;
    STD_TORCH_CHECK(k < kMaxStates, "dynemb::", op, ": state of slab ", i % slabs,
                    " has more than ", kMaxStates, " values per weight");
    if (type == ScalarType::Byte) {
      check_tensor(op, "state", tensor, ScalarType::Byte);
      slab.storage[k] = Storage::kBlockFloat8;
      slab.row_bytes[k] = block_row_bytes(dim);
      check_size(op, "state", tensor, 1, slab.row_bytes[k]);
    } else {
      STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16, "dynemb::", op,
                      ": state has dtype ", dtype_name(type),
                      ", expected float32, bfloat16 or uint8");
      slab.storage[k] = storage_of(op, "state", tensor);
      slab.row_bytes[k] = dim * storage_bytes(slab.storage[k]);
      check_size(op, "state", tensor, 1, dim);
    }
    slab.element[k] = static_cast<char*>(tensor.data_ptr());
  }
  return result;
}

}  // namespace dynemb::cpu
