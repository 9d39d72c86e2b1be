// Checks of arguments of ops on values of many features, for all devices.
#pragma once

#include <vector>

#include "arguments/tensors.h"

namespace dynemb {

std::vector<int64_t> shape_of(const Tensor& tensor);

// bucketize: of each feature, values and boundaries of one of four dtypes.
void check_bucketize(const char* op, const std::vector<Tensor>& values,
                     const std::vector<Tensor>& boundaries);

// Hashes of a feature are first[f] to first[f + 1] of multipliers, primes and buckets.
std::vector<int64_t> check_hashes(const char* op, const std::vector<int64_t>& multipliers,
                                  const std::vector<int64_t>& primes,
                                  const std::vector<int64_t>& buckets,
                                  const std::vector<int64_t>& hashes, size_t features);

// Strings: bytes, and where each begins.
void check_strings(const char* op, const std::vector<Tensor>& values,
                   const std::vector<Tensor>& offsets);
void check_seed(const char* op, int64_t seed);

// Parts that divide slots.
void check_slots(const char* op, int64_t parts, int64_t slots);

}  // namespace dynemb
