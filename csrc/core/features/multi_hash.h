// A hash of ids for hashing tricks with several tables.
#pragma once

#include "core/features/divisor.h"

namespace dynemb {

struct ModularHash {
  uint64_t multiplier;
  Divisor prime;
  Divisor buckets;

  // The product is modulo 2^64.
  DYNEMB_HD uint64_t modular_bucket(uint64_t x) const {
    return buckets.remainder(prime.remainder(x * multiplier));
  }
};

}  // namespace dynemb
