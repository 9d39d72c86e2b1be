#include "arguments/features.h"

#include "core/features/string_hash.h"

namespace dynemb {
namespace {

void check_vector(const char* op, const char* name, size_t i, const Tensor& tensor) {
  DYNEMB_CHECK(tensor.is_contiguous(), "dynemb::", op, ": ", entry_name(name, i),
               " is not contiguous: call .contiguous()");
  DYNEMB_CHECK(tensor.dim() == 1, "dynemb::", op, ": ", entry_name(name, i), " has ", tensor.dim(),
               " dimensions, expected 1");
}

bool has_order(ScalarType dtype) {
  return dtype == ScalarType::Float || dtype == ScalarType::Double || dtype == ScalarType::Int ||
         dtype == ScalarType::Long;
}

}  // namespace

std::vector<int64_t> shape_of(const Tensor& tensor) {
  std::vector<int64_t> shape;
  for (int64_t i = 0; i < tensor.dim(); ++i) shape.push_back(tensor.size(i));
  return shape;
}

void check_divisors(const char* op, const char* name, const std::vector<int64_t>& divisors,
                    size_t features) {
  check_entries(op, name, divisors.size(), features);
  for (size_t i = 0; i < divisors.size(); ++i) {
    DYNEMB_CHECK(divisors[i] >= 1, "dynemb::", op, ": ", entry_name(name, i), " is ", divisors[i],
                 ", expected at least 1");
  }
}

void check_bucketize(const CallContext& call, const std::vector<Tensor>& values,
                     const std::vector<Tensor>& boundaries) {
  check_entries(call.op, "boundaries", boundaries.size(), values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    check_defined(call.op, "values", i, values[i]);
    check_defined(call.op, "boundaries", i, boundaries[i]);
    const ScalarType dtype = values[i].scalar_type();
    DYNEMB_CHECK(has_order(dtype), "dynemb::", call.op, ": ", entry_name("values", i),
                 " has dtype ", dtype_name(dtype), ", expected float32, float64, int32 or int64");
    DYNEMB_CHECK(values[i].is_contiguous(), "dynemb::", call.op, ": ", entry_name("values", i),
                 " is not contiguous: call .contiguous()");
    DYNEMB_CHECK(boundaries[i].scalar_type() == dtype, "dynemb::", call.op, ": ",
                 entry_name("boundaries", i), " has dtype ",
                 dtype_name(boundaries[i].scalar_type()), ", expected ", dtype_name(dtype), ", as ",
                 entry_name("values", i));
    check_vector(call.op, "boundaries", i, boundaries[i]);
  }
  check_devices(call, "values", values);
  check_devices(call, "boundaries", boundaries);
}

std::vector<int64_t> check_hashes(const char* op, const std::vector<int64_t>& multipliers,
                                  const std::vector<int64_t>& primes,
                                  const std::vector<int64_t>& buckets,
                                  const std::vector<int64_t>& hashes, size_t features) {
  check_entries(op, "hashes", hashes.size(), features);
  std::vector<int64_t> first(features + 1, 0);
  for (size_t f = 0; f < features; ++f) {
    DYNEMB_CHECK(hashes[f] >= 0, "dynemb::", op, ": ", entry_name("hashes", f), " is ", hashes[f],
                 ", expected at least 0");
    DYNEMB_CHECK(static_cast<uint64_t>(hashes[f]) <= primes.size(), "dynemb::", op, ": ",
                 entry_name("hashes", f), " is ", hashes[f], ", but there are ", primes.size(),
                 " primes");
    first[f + 1] = first[f] + hashes[f];
  }
  const auto total = static_cast<size_t>(first[features]);
  DYNEMB_CHECK(multipliers.size() == total && primes.size() == total && buckets.size() == total,
               "dynemb::", op, ": there are ", multipliers.size(), " multipliers, ", primes.size(),
               " primes and ", buckets.size(), " buckets, expected ", total,
               " of each, the sum of hashes");
  for (size_t h = 0; h < total; ++h) {
    DYNEMB_CHECK(primes[h] >= 1, "dynemb::", op, ": ", entry_name("primes", h), " is ", primes[h],
                 ", expected at least 1");
    DYNEMB_CHECK(buckets[h] >= 1, "dynemb::", op, ": ", entry_name("buckets", h), " is ",
                 buckets[h], ", expected at least 1");
  }
  return first;
}

void check_strings(const CallContext& call, const std::vector<Tensor>& values,
                   const std::vector<Tensor>& offsets) {
  check_list(call, "offsets", offsets, values.size(), ScalarType::Long, 1);
  for (size_t i = 0; i < values.size(); ++i) {
    check_defined(call.op, "values", i, values[i]);
    const ScalarType dtype = values[i].scalar_type();
    DYNEMB_CHECK(dtype == ScalarType::Byte || dtype == ScalarType::Char, "dynemb::", call.op, ": ",
                 entry_name("values", i), " has dtype ", dtype_name(dtype),
                 ", expected uint8 or int8");
    check_vector(call.op, "values", i, values[i]);
    DYNEMB_CHECK(offsets[i].size(0) >= 1, "dynemb::", call.op, ": ", entry_name("offsets", i),
                 " is empty, expected [n + 1]");
  }
  check_devices(call, "values", values);
}

void check_string_hash(const char* op, int64_t hash, int64_t seed) {
  DYNEMB_CHECK(hash >= kHashFarm && hash <= kHashMurmur64a, "dynemb::", op, ": hash is ", hash,
               ", expected 0 (FarmHash), 1 (MurmurHash3) or 2 (MurmurHash64A)");
  DYNEMB_CHECK(hash != kHashFarm || seed == 0, "dynemb::", op, ": seed is ", seed,
               ", expected 0: FarmHash has none");
  DYNEMB_CHECK(hash != kHashMurmur3 || (seed >= 0 && seed <= UINT32_MAX), "dynemb::", op,
               ": seed is ", seed, ", expected 0 to ", UINT32_MAX);
}

}  // namespace dynemb
