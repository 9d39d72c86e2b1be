// string_hash: hashes of byte strings of many features.
#include <torch/csrc/stable/library.h>

#include <vector>

#include "core/features/farmhash.h"
#include "core/features/murmurhash.h"
#include "core/features/string_hash.h"
#include "cpu/features/lists.h"

namespace dynemb::cpu {
namespace {

template <class Hash>
std::vector<Tensor> hashed(const char* op, const std::vector<Tensor>& values,
                           const std::vector<Tensor>& offsets, const Hash& hash) {
  check_strings(op, values, offsets);
  std::vector<Tensor> results;
  int64_t bytes = 0;
  for (size_t f = 0; f < values.size(); ++f) {
    check_list_offsets(op, "offsets", f, offsets[f], values[f].numel());
    bytes += values[f].numel();
    results.push_back(empty_cpu({offsets[f].size(0) - 1}, ScalarType::Long));
  }
  const std::vector<int64_t> begin = element_begins(results);
  const int64_t length = bytes / std::max<int64_t>(begin.back(), 1);
  for_each_range(begin, 4 + length / 8, [&](size_t f, int64_t first, int64_t last) {
    const auto* byte = static_cast<const uint8_t*>(values[f].data_ptr());
    const auto* offset = static_cast<const int64_t*>(offsets[f].data_ptr());
    auto* to = static_cast<uint64_t*>(results[f].data_ptr());
    for (int64_t i = first; i < last; ++i) {
      to[i] = hash(byte + offset[i], offset[i + 1] - offset[i]);
    }
  });
  return results;
}

std::vector<Tensor> string_hash(std::vector<Tensor> values, std::vector<Tensor> offsets,
                                int64_t hash, int64_t seed) {
  const char* op = "string_hash";
  check_string_hash(op, hash, seed);
  switch (hash) {
    case kHashFarm:
      return hashed(op, values, offsets,
                    [](const uint8_t* s, int64_t length) { return farmhash64(s, length); });
    case kHashMurmur3:
      return hashed(op, values, offsets, [seed](const uint8_t* s, int64_t length) {
        return murmurhash64(s, length, static_cast<uint32_t>(seed));
      });
    default:
      return hashed(op, values, offsets, [seed](const uint8_t* s, int64_t length) {
        return murmurhash64a(s, length, static_cast<uint64_t>(seed));
      });
  }
}

}  // namespace
}  // namespace dynemb::cpu

STABLE_TORCH_LIBRARY_IMPL(dynemb, CPU, m) {
  m.impl("string_hash", TORCH_BOX(&dynemb::cpu::string_hash));
}
