// farmhash, murmurhash, murmurhash64a: hashes of byte strings of many features.
#include "core/features/farmhash.h"
#include "core/features/murmurhash.h"
#include "cuda/features/lists.h"
#include "cuda/index/args.h"

namespace dynemb::cuda {
namespace {

struct StringsJob {
  FeatureItems offsets;  // an item per offset, which is one more than strings
  const uint8_t* const* bytes;
  const int64_t* byte_counts;
  const int64_t* const* offset;
  uint64_t* const* results;
  ErrorSink errors;
};

struct FarmHash {
  __device__ __forceinline__ uint64_t operator()(const uint8_t* s, int64_t length) const {
    return farmhash64(s, length);
  }
};
struct MurmurHash {
  uint32_t seed;
  __device__ __forceinline__ uint64_t operator()(const uint8_t* s, int64_t length) const {
    return murmurhash64(s, length, seed);
  }
};
struct MurmurHash64A {
  uint64_t seed;
  __device__ __forceinline__ uint64_t operator()(const uint8_t* s, int64_t length) const {
    return dynemb::murmurhash64a(s, length, seed);
  }
};

// A thread per offset, which checks it and hashes the string that begins there: 16 bytes of offsets
// and the string read, 8 written. Neighbours read neighbouring strings.
template <class Hash>
__global__ void hash_strings(StringsJob job, Hash hash) {
  const int64_t number = thread_number();
  if (number >= job.offsets.count) return;
  const FeatureItem item = job.offsets.at(number);
  const int64_t f = item.feature;
  const int64_t strings = job.offsets.begin[f + 1] - job.offsets.begin[f] - 1;
  const RaggedRows rows{job.offset[f], strings, job.byte_counts[f]};
  rows.check(item.index, f, job.errors);
  if (item.index == strings) return;
  const int64_t begin = rows.begin(item.index);
  job.results[f][item.index] = hash(job.bytes[f] + begin, rows.end(item.index) - begin);
}

template <class Hash>
std::vector<Tensor> hashed(const Call& call, const std::vector<Tensor>& values,
                           const std::vector<Tensor>& offsets, const Hash& hash) {
  check_strings(call, values, offsets);
  std::vector<Tensor> results;
  std::vector<int64_t> byte_counts;
  for (size_t f = 0; f < values.size(); ++f) {
    byte_counts.push_back(values[f].numel());
    results.push_back(call.empty({offsets[f].size(0) - 1}, ScalarType::Long));
  }
  FeatureWords words;
  const auto begin = words.add(element_begins(offsets));
  const auto bytes = words.add_addresses<const uint8_t>(values);
  const auto counts = words.add(byte_counts);
  const auto from = words.add_addresses<const int64_t>(offsets);
  const auto to = words.add_addresses<uint64_t>(results);
  words.upload(call);
  const StringsJob job{words.items(begin), words.get(bytes), words.get(counts),
                       words.get(from),    words.get(to),    error_sink(call)};
  call.launch(hash_strings<Hash>, job.offsets.count, 0, job, hash);
  return results;
}

std::vector<Tensor> farmhash(std::vector<Tensor> values, std::vector<Tensor> offsets) {
  const Call call("farmhash", "values[0]", owner_of_list("farmhash", values));
  return hashed(call, values, offsets, FarmHash{});
}

std::vector<Tensor> murmurhash(std::vector<Tensor> values, std::vector<Tensor> offsets,
                               int64_t seed) {
  const Call call("murmurhash", "values[0]", owner_of_list("murmurhash", values));
  check_seed(call.op, seed);
  return hashed(call, values, offsets, MurmurHash{static_cast<uint32_t>(seed)});
}

std::vector<Tensor> murmurhash64a(std::vector<Tensor> values, std::vector<Tensor> offsets,
                                  int64_t seed) {
  const Call call("murmurhash64a", "values[0]", owner_of_list("murmurhash64a", values));
  return hashed(call, values, offsets, MurmurHash64A{static_cast<uint64_t>(seed)});
}

}  // namespace
}  // namespace dynemb::cuda

DYNEMB_IMPLEMENT_OPS(m) {
  m.impl("farmhash", TORCH_BOX(&dynemb::cuda::farmhash));
  m.impl("murmurhash", TORCH_BOX(&dynemb::cuda::murmurhash));
  m.impl("murmurhash64a", TORCH_BOX(&dynemb::cuda::murmurhash64a));
}
