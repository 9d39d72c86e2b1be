// Quotients and remainders of 64-bit words by one divisor: a multiplication in place of a division.
#pragma once

#include "core/index/hash.h"

namespace dynemb {

// With m = floor((2^64 - 1) / d), the high word of x * m is floor(x / d) or one less, since
// x / d - 2 < x * m / 2^64 <= x / d (Barrett 1986). One subtraction makes up for it.
struct Divisor {
  uint64_t value;  // at least 1
  uint64_t reciprocal;

  DYNEMB_HD uint64_t quotient(uint64_t x) const {
    const uint64_t low = multiply_high(x, reciprocal);
    return x - low * value >= value ? low + 1 : low;
  }
  DYNEMB_HD uint64_t remainder(uint64_t x) const {
    const uint64_t rest = x - multiply_high(x, reciprocal) * value;
    return rest >= value ? rest - value : rest;
  }
};

DYNEMB_HD Divisor make_divisor(uint64_t value) { return {value, ~uint64_t{0} / value}; }

}  // namespace dynemb
