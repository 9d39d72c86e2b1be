#include "cuda/features/lists.h"

namespace dynemb::cuda {

const Tensor& owner_of_list(const char* op, const std::vector<Tensor>& list) {
  check_entries(op, "the list", list.size(), list.size());
  return list[0];
}

std::vector<Tensor> empty_like_list(const Call& call, const std::vector<Tensor>& list,
                                    ScalarType dtype) {
  std::vector<Tensor> result;
  result.reserve(list.size());
  for (const Tensor& tensor : list) result.push_back(call.empty(shape_of(tensor), dtype));
  return result;
}

void check_on_device([[maybe_unused]] const Call& call, [[maybe_unused]] const char* name,
                     [[maybe_unused]] const std::vector<Tensor>& list) {
#if !defined(DYNEMB_EMULATED)
  for (size_t i = 0; i < list.size(); ++i) {
    const bool here = list[i].is_cuda() && list[i].get_device_index() == call.device;
    STD_TORCH_CHECK(here, "dynemb::", call.op, ": ", entry_name(name, i), " is on ",
                    list[i].is_cuda() ? "cuda:" : "the CPU",
                    list[i].is_cuda() ? std::to_string(list[i].get_device_index()) : "",
                    ", expected cuda:", call.device, ", as the first tensor");
  }
#endif
}

void check_list(const Call& call, const char* name, const std::vector<Tensor>& list,
                size_t features, ScalarType dtype, int64_t dims) {
  check_entries(call.op, name, list.size(), features);
  check_list_layout(call.op, name, list, dtype, dims);
  check_on_device(call, name, list);
}

}  // namespace dynemb::cuda
