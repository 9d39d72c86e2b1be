// Checked arguments of ops on values of many features.
#pragma once

#include <vector>

#include "arguments/tensors.h"

namespace dynemb {

std::vector<int64_t> shape_of(const Tensor& tensor);

// Raises unless each of `features` has a divisor of at least 1.
void check_divisors(const char* op, const char* name, const std::vector<int64_t>& divisors,
                    size_t features);

// bucketize: for each feature, values and boundaries of one of four dtypes.
void check_bucketize(const CallContext& call, const std::vector<Tensor>& values,
                     const std::vector<Tensor>& boundaries);

// Hashes of a feature are first[f] to first[f + 1] of multipliers, primes and buckets.
std::vector<int64_t> check_hashes(const char* op, const std::vector<int64_t>& multipliers,
                                  const std::vector<int64_t>& primes,
                                  const std::vector<int64_t>& buckets,
                                  const std::vector<int64_t>& hashes, size_t features);

// Strings: bytes, and the offset where each begins.
void check_strings(const CallContext& call, const std::vector<Tensor>& values,
                   const std::vector<Tensor>& offsets);
// `hash`: a StringHash, `seed`: one that it takes.
void check_string_hash(const char* op, int64_t hash, int64_t seed);

}  // namespace dynemb
