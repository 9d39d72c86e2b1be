// string_hash: hashes of byte strings of many features.
#include "core/features/farmhash.h"
#include "core/features/murmurhash.h"
#include "core/features/string_hash.h"
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
    return murmurhash64a(s, length, seed);
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

std::vector<Tensor> string_hash(std::vector<Tensor> values, std::vector<Tensor> offsets,
                                int64_t hash, int64_t seed) {
  const char* op = "string_hash";
  const Call call(op, "values[0]", owner_of_list(op, values));
  check_string_hash(op, hash, seed);
  switch (hash) {
    case kHashFarm:
      return hashed(call, values, offsets, FarmHash{});
    case kHashMurmur3:
      return hashed(call, values, offsets, MurmurHash{static_cast<uint32_t>(seed)});
    default:
      return hashed(call, values, offsets, MurmurHash64A{static_cast<uint64_t>(seed)});
  }
}

}  // namespace
}  // namespace dynemb::cuda

DYNEMB_IMPLEMENT_OPS(m) { m.impl("string_hash", TORCH_BOX(&dynemb::cuda::string_hash)); }
