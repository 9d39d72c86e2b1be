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

}  // namespace dynemb::cuda
