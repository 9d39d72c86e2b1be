// mod, bucketize, multi_hash: values of many features.
#include <torch/csrc/stable/library.h>

#include <vector>

#include "core/features/bucketize.h"
#include "core/features/divisor.h"
#include "core/features/multi_hash.h"
#include "cpu/features/lists.h"

namespace dynemb::cpu {
namespace {

template <class T>
const T* read(const Tensor& tensor) {
  return static_cast<const T*>(tensor.data_ptr());
}

std::vector<Tensor> mod(std::vector<Tensor> values, std::vector<int64_t> divisors) {
  const char* op = "mod";
  check_list(op, "values", values, values.size(), ScalarType::Long, kAnyDims);
  check_divisors(op, "divisors", divisors, values.size());
  std::vector<Tensor> results = empty_like_list(values, ScalarType::Long);
  for_each_range(element_begins(values), 1, [&](size_t f, int64_t first, int64_t last) {
    const Divisor divisor = make_divisor(static_cast<uint64_t>(divisors[f]));
    const auto* from = read<uint64_t>(values[f]);
    auto* to = static_cast<uint64_t*>(results[f].data_ptr());
    for (int64_t i = first; i < last; ++i) to[i] = divisor.remainder(from[i]);
  });
  return results;
}

template <class T>
void check_ascending(const char* op, size_t f, const Tensor& boundaries) {
  const T* bound = read<T>(boundaries);
  for (int64_t i = 0; i < boundaries.size(0); ++i) {
    const T before = i > 0 ? bound[i - 1] : bound[i];
    DYNEMB_CHECK(bound[i] >= before, "dynemb::", op, ": ", entry_name("boundaries", f), "[", i,
                 "] is ", bound[i], ", expected at least the one before, ", before);
  }
}

template <class T>
void find_buckets(const Tensor& values, const Tensor& boundaries, int64_t first, int64_t last,
                  int64_t* buckets) {
  const T* value = read<T>(values);
  const T* bound = read<T>(boundaries);
  const int64_t count = boundaries.size(0);
  for (int64_t i = first; i < last; ++i) buckets[i] = bucket_of_value(bound, count, value[i]);
}

// Calls f with a value of the type of the dtype, one of those that have an order.
template <class F>
void with_type(ScalarType dtype, const F& f) {
  if (dtype == ScalarType::Float) return f(float{});
  if (dtype == ScalarType::Double) return f(double{});
  if (dtype == ScalarType::Int) return f(int32_t{});
  f(int64_t{});
}

std::vector<Tensor> bucketize(std::vector<Tensor> values, std::vector<Tensor> boundaries) {
  const char* op = "bucketize";
  check_bucketize(op, values, boundaries);
  for (size_t f = 0; f < values.size(); ++f) {
    with_type(values[f].scalar_type(),
              [&](auto type) { check_ascending<decltype(type)>(op, f, boundaries[f]); });
  }
  std::vector<Tensor> results = empty_like_list(values, ScalarType::Long);
  for_each_range(element_begins(values), 4, [&](size_t f, int64_t first, int64_t last) {
    auto* to = static_cast<int64_t*>(results[f].data_ptr());
    with_type(values[f].scalar_type(), [&](auto type) {
      find_buckets<decltype(type)>(values[f], boundaries[f], first, last, to);
    });
  });
  return results;
}

// Hash h of feature f is result first[f] + h.
std::vector<Tensor> multi_hash(std::vector<Tensor> values, std::vector<int64_t> multipliers,
                               std::vector<int64_t> primes, std::vector<int64_t> buckets,
                               std::vector<int64_t> hashes) {
  const char* op = "multi_hash";
  check_list(op, "values", values, values.size(), ScalarType::Long, kAnyDims);
  const std::vector<int64_t> first_hash =
      check_hashes(op, multipliers, primes, buckets, hashes, values.size());
  std::vector<Tensor> results;
  for (size_t f = 0; f < values.size(); ++f) {
    for (int64_t h = 0; h < hashes[f]; ++h) {
      results.push_back(empty_cpu(shape_of(values[f]), ScalarType::Long));
    }
  }
  for_each_range(element_begins(values), 4, [&](size_t f, int64_t first, int64_t last) {
    const auto* from = read<uint64_t>(values[f]);
    for (auto h = static_cast<size_t>(first_hash[f]); h < static_cast<size_t>(first_hash[f + 1]);
         ++h) {
      const ModularHash hash{static_cast<uint64_t>(multipliers[h]),
                             make_divisor(static_cast<uint64_t>(primes[h])),
                             make_divisor(static_cast<uint64_t>(buckets[h]))};
      auto* to = static_cast<uint64_t*>(results[h].data_ptr());
      for (int64_t i = first; i < last; ++i) to[i] = hash.modular_bucket(from[i]);
    }
  });
  return results;
}

}  // namespace
}  // namespace dynemb::cpu

STABLE_TORCH_LIBRARY_IMPL(dynemb, CPU, m) {
  m.impl("mod", TORCH_BOX(&dynemb::cpu::mod));
  m.impl("bucketize", TORCH_BOX(&dynemb::cpu::bucketize));
  m.impl("multi_hash", TORCH_BOX(&dynemb::cpu::multi_hash));
}
