// mod: values of many features.
#include <torch/csrc/stable/library.h>

#include <vector>

#include "core/divisor.h"
#include "cpu/feature_lists.h"

namespace dynemb::cpu {
namespace {

const uint64_t* words_of(const Tensor& tensor) {
  return static_cast<const uint64_t*>(tensor.data_ptr());
}

std::vector<Tensor> empty_like_list(const std::vector<Tensor>& list) {
  std::vector<Tensor> result;
  result.reserve(list.size());
  for (const Tensor& tensor : list) result.push_back(torch::stable::empty_like(tensor));
  return result;
}

std::vector<Tensor> mod(std::vector<Tensor> values, std::vector<int64_t> divisors) {
  const char* op = "mod";
  check_list(op, "values", values, values.size(), ScalarType::Long, kAnyDims);
  check_divisors(op, "divisors", divisors, values.size());
  std::vector<Tensor> results = empty_like_list(values);
  for_each_range(element_begins(values), 1, [&](size_t f, int64_t first, int64_t last) {
    const Divisor divisor = make_divisor(static_cast<uint64_t>(divisors[f]));
    const uint64_t* from = words_of(values[f]);
    auto* to = static_cast<uint64_t*>(results[f].data_ptr());
    for (int64_t i = first; i < last; ++i) to[i] = divisor.remainder(from[i]);
  });
  return results;
}

}  // namespace
}  // namespace dynemb::cpu

STABLE_TORCH_LIBRARY_IMPL(dynemb, CPU, m) { m.impl("mod", TORCH_BOX(&dynemb::cpu::mod)); }
