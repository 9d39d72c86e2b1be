// mod, bucketize, multi_hash: values of many features.
#include "core/features/bucketize.h"
#include "core/features/divisor.h"
#include "core/features/multi_hash.h"
#include "cuda/features/lists.h"

namespace dynemb::cuda {
namespace {

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
  std::vector<Tensor> results = empty_like_list(call, values, ScalarType::Long);
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

enum ValueType : int64_t { kFloat32, kFloat64, kInt32, kInt64 };
int64_t value_type(ScalarType dtype) {
  if (dtype == ScalarType::Float) return kFloat32;
  if (dtype == ScalarType::Double) return kFloat64;
  return dtype == ScalarType::Int ? kInt32 : kInt64;
}

struct BucketizeJob {
  FeatureItems items;
  const void* const* values;
  const void* const* boundaries;
  const int64_t* boundary_counts;
  const int64_t* types;  // ValueType
  int64_t* const* results;
};

template <class T>
__device__ __forceinline__ int64_t find_bucket(const BucketizeJob& job, const FeatureItem& item) {
  return bucket_of_value(static_cast<const T*>(job.boundaries[item.feature]),
                         job.boundary_counts[item.feature],
                         static_cast<const T*>(job.values[item.feature])[item.index]);
}

// A thread per value: 4 or 8 bytes read and 8 written in order; both searches stay in the caches if
// features have few boundaries.
__global__ void find_buckets(BucketizeJob job) {
  const int64_t number = thread_number();
  if (number >= job.items.count) return;
  const FeatureItem item = job.items.at(number);
  int64_t bucket = 0;
  switch (job.types[item.feature]) {
    case kFloat32:
      bucket = find_bucket<float>(job, item);
      break;
    case kFloat64:
      bucket = find_bucket<double>(job, item);
      break;
    case kInt32:
      bucket = find_bucket<int32_t>(job, item);
      break;
    default:
      bucket = find_bucket<int64_t>(job, item);
  }
  job.results[item.feature][item.index] = bucket;
}

std::vector<Tensor> bucketize(std::vector<Tensor> values, std::vector<Tensor> boundaries) {
  const Call call("bucketize", "values[0]", owner_of_list("bucketize", values));
  check_bucketize(call, values, boundaries);
  std::vector<int64_t> sizes;
  std::vector<int64_t> value_types;
  for (size_t f = 0; f < values.size(); ++f) {
    sizes.push_back(boundaries[f].size(0));
    value_types.push_back(value_type(values[f].scalar_type()));
  }
  std::vector<Tensor> results = empty_like_list(call, values, ScalarType::Long);
  FeatureWords words;
  const auto begin = words.add(element_begins(values));
  const auto from = words.add_addresses<const void>(values);
  const auto bounds = words.add_addresses<const void>(boundaries);
  const auto counts = words.add(sizes);
  const auto types = words.add(value_types);
  const auto to = words.add_addresses<int64_t>(results);
  words.upload(call);
  const BucketizeJob job{words.items(begin), words.get(from),  words.get(bounds),
                         words.get(counts),  words.get(types), words.get(to)};
  call.launch(find_buckets, job.items.count, 0, job);
  return results;
}

struct MultiHashJob {
  FeatureItems items;
  const uint64_t* const* values;
  const int64_t* first_hash;  // [features + 1]
  const int64_t* multipliers;
  const int64_t* primes;  // divisors, as are buckets
  const int64_t* buckets;
  uint64_t* const* results;
};

// A thread per value: 8 bytes read in order, and 8 written for every hash.
__global__ void hash_values(MultiHashJob job) {
  const int64_t number = thread_number();
  if (number >= job.items.count) return;
  const FeatureItem item = job.items.at(number);
  const uint64_t value = job.values[item.feature][item.index];
  for (int64_t h = job.first_hash[item.feature]; h < job.first_hash[item.feature + 1]; ++h) {
    const ModularHash hash{static_cast<uint64_t>(job.multipliers[h]), divisor_at(job.primes, h),
                           divisor_at(job.buckets, h)};
    job.results[h][item.index] = hash.modular_bucket(value);
  }
}

std::vector<Tensor> multi_hash(std::vector<Tensor> values, std::vector<int64_t> multipliers,
                               std::vector<int64_t> primes, std::vector<int64_t> buckets,
                               std::vector<int64_t> hashes) {
  const Call call("multi_hash", "values[0]", owner_of_list("multi_hash", values));
  check_list(call, "values", values, values.size(), ScalarType::Long, kAnyDims);
  const std::vector<int64_t> first_hash =
      check_hashes(call.op, multipliers, primes, buckets, hashes, values.size());
  std::vector<Tensor> results;
  for (size_t f = 0; f < values.size(); ++f) {
    for (int64_t h = 0; h < hashes[f]; ++h) {
      results.push_back(call.empty(shape_of(values[f]), ScalarType::Long));
    }
  }
  FeatureWords words;
  const auto begin = words.add(element_begins(values));
  const auto from = words.add_addresses<const uint64_t>(values);
  const auto first = words.add(first_hash);
  const auto factors = words.add(multipliers);
  const auto prime_words = words.add(divisor_words(primes));
  const auto bucket_words = words.add(divisor_words(buckets));
  const auto to = words.add_addresses<uint64_t>(results);
  words.upload(call);
  const MultiHashJob job{words.items(begin), words.get(from),        words.get(first),
                         words.get(factors), words.get(prime_words), words.get(bucket_words),
                         words.get(to)};
  call.launch(hash_values, job.items.count, 0, job);
  return results;
}

}  // namespace
}  // namespace dynemb::cuda

DYNEMB_IMPLEMENT_OPS(m) {
  m.impl("mod", TORCH_BOX(&dynemb::cuda::mod));
  m.impl("bucketize", TORCH_BOX(&dynemb::cuda::bucketize));
  m.impl("multi_hash", TORCH_BOX(&dynemb::cuda::multi_hash));
}
