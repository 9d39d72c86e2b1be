// Custom scores: how what a lookup brings is combined with what an id has.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "core/policy/decay.h"

namespace dynemb {

enum Combine : int64_t {
  kCombineNone = -1,  // the table keeps no custom scores
  kCombineLast = 0,   // the largest of the call's
  kCombineMax = 1,
  kCombineSum = 2,
  kCombineDecayedSum = 3,  // logarithms, as decayed counts, in the order of occurrence; a value is
                           // the bits of a double
};
constexpr int64_t kCombines = 4;

// Largest and smallest of int64 instead of a wrap.
DYNEMB_HD int64_t add_saturated(int64_t a, int64_t b) {
  if (b > 0 && a > INT64_MAX - b) return INT64_MAX;
  if (b < 0 && a < INT64_MIN - b) return INT64_MIN;
  return a + b;
}

// log2 of a double, as decayed counts store it, to 30 bits of the number. What is not above 0 or
// not finite, and subnormal numbers, weigh nothing.
DYNEMB_HD int64_t decayed_weight(int64_t bits) {
  constexpr int kMantissaBits = 52;
  const int64_t exponent = bits >> kMantissaBits;  // with the sign
  if (exponent <= 0 || exponent == 0x7ff) return kNeverOccurred;
  const int64_t mantissa = (bits & ((int64_t{1} << kMantissaBits) - 1)) >> (kMantissaBits - 30);
  return decayed_occurrences((exponent - 1023 - 30) * kDecayOne, (int64_t{1} << 30) | mantissa);
}

// What a value becomes before it is combined; `time`: decay_time of now.
DYNEMB_HD int64_t brought_score(int64_t combine, int64_t value, int64_t time) {
  if (combine != kCombineDecayedSum) return value;
  const int64_t weight = decayed_weight(value);
  return weight == kNeverOccurred ? kNeverOccurred : time + weight;
}

DYNEMB_HD int64_t combined_score(int64_t combine, int64_t score, int64_t brought) {
  if (combine == kCombineSum) return add_saturated(score, brought);
  if (combine == kCombineDecayedSum) {
    return brought == kNeverOccurred ? score : add_decayed(score, brought);
  }
  return score > brought ? score : brought;
}

}  // namespace dynemb
