// mod: values of many features.
#include "core/divisor.h"
#include "cuda/feature_lists.h"

namespace dynemb::cuda {
namespace {

std::vector<Tensor> empty_like_list(const std::vector<Tensor>& list) {
  std::vector<Tensor> result;
  result.reserve(list.size());
  for (const Tensor& tensor : list) result.push_back(torch::stable::empty_like(tensor));
  return result;
}

// Values and reciprocals of divisors, one after another.
std::vector<int64_t> divisor_words(const std::vector<int64_t>& divisors) {
  std::vector<int64_t> words;
  for (const int64_t divisor : divisors) {
    words.push_back(divisor);
    words.push_back(static_cast<int64_t>(make_divisor(static_cast<uint64_t>(divisor)).reciprocal));
  }
  return words;
}
__device__ __forceinline__ Divisor divisor_at(const int64_t* words, int64_t i) {
  return {static_cast<uint64_t>(words[2 * i]), static_cast<uint64_t>(words[2 * i + 1])};
}

// A thread per value: 8 bytes read and written in order; the search for its feature stays in the
// caches.
__global__ void take_remainders(FeatureItems items, const uint64_t* const* values,
                                uint64_t* const* results, const int64_t* divisors) {
  const int64_t number = thread_number();
  if (number >= items.count) return;
  const FeatureItem item = items.at(number);
  const uint64_t value = values[item.feature][item.index];
  results[item.feature][item.index] = divisor_at(divisors, item.feature).remainder(value);
}

std::vector<Tensor> mod(std::vector<Tensor> values, std::vector<int64_t> divisors) {
  const Call call("mod", "values[0]", owner_of_list("mod", values));
  check_list(call, "values", values, values.size(), ScalarType::Long, kAnyDims);
  check_divisors(call.op, "divisors", divisors, values.size());
  std::vector<Tensor> results = empty_like_list(values);
  FeatureWords words;
  const auto begin = words.add(element_begins(values));
  const auto from = words.add_addresses<const uint64_t>(values);
  const auto to = words.add_addresses<uint64_t>(results);
  const auto by = words.add(divisor_words(divisors));
  words.upload(call);
  const FeatureItems items = words.items(begin);
  call.launch(take_remainders, items.count, 0, items, words.get(from), words.get(to),
              words.get(by));
  return results;
}

}  // namespace
}  // namespace dynemb::cuda

DYNEMB_IMPLEMENT_OPS(m) { m.impl("mod", TORCH_BOX(&dynemb::cuda::mod)); }
