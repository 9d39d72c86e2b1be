// Exponentially decayed counts that need neither a sweep nor a clock at eviction: forward decay
// (Cormode, Shkapenyuk, Srivastava, Xu 2009).
//
// With half-life h, an id keeps L = log2(sum over its occurrences of 2^(t / h)), int64 with
// kDecayBits after the point. The order of L is that of the decayed counts at every later time; the
// count as of now is 2^(L - now / h). All is integer arithmetic: CPU, GPU and every rank have the
// same bits. Sums are rounded, so weights that differ are added in the order of occurrence.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "core/policy/decay_table.h"

namespace dynemb {

constexpr int kDecayBits = 30;
constexpr int64_t kDecayOne = int64_t{1} << kDecayBits;
// L of an id without an occurrence: below that of any other, and far from overflow.
constexpr int64_t kNeverOccurred = -(int64_t{1} << 62);
// Half-lives have passed since time 0, at most. Later times count as this one.
constexpr int64_t kMostHalfLives = (int64_t{1} << 32) - 1;
constexpr int64_t kMostHalfLife = int64_t{1} << 32;  // ticks

// L of one occurrence at a time, in ticks from 0 on, with a half-life from 1 to kMostHalfLife.
DYNEMB_HD int64_t decay_time(int64_t time, int64_t half_life) {
  if (time < 0 || half_life < 1 || half_life > kMostHalfLife) return 0;  // of damaged tensors
  const int64_t whole = time / half_life;
  if (whole >= kMostHalfLives) return kMostHalfLives << kDecayBits;
  return (whole << kDecayBits) + ((time - whole * half_life) << kDecayBits) / half_life;
}

// log2(2^a + 2^b), from a table with steps of 1/32 and quadratic interpolation.
DYNEMB_HD int64_t add_decayed(int64_t a, int64_t b) {
  constexpr int kStepBits = kDecayBits - 5;
  constexpr int64_t kStep = int64_t{1} << kStepBits;
  const int64_t most = a > b ? a : b;
  const uint64_t apart = static_cast<uint64_t>(most) - static_cast<uint64_t>(a > b ? b : a);
  if (apart >= (uint64_t{32} << kDecayBits)) return most;
  const auto entry = static_cast<int64_t>(apart >> kStepBits);
  const auto part = static_cast<int64_t>(apart & (kStep - 1));
  const int64_t first = decay_table(entry);
  const int64_t second = decay_table(entry + 1);
  const int64_t bend = first - 2 * second + decay_table(entry + 2);
  const int64_t curve = ((part * (kStep - part)) >> (kStepBits + 1)) * bend;
  const int64_t sum = first - ((part * (first - second) + curve) >> kStepBits);
  constexpr int kDrop = kDecayTableBits - kDecayBits;
  return most + ((sum + (int64_t{1} << (kDrop - 1))) >> kDrop);
}

// `word`: not 0.
DYNEMB_HD int highest_bit(uint64_t word) {
#if defined(__CUDA_ARCH__)
  return 63 - __clzll(static_cast<long long>(word));
#else
  return 63 - __builtin_clzll(word);
#endif
}

// L of so many occurrences at one time: `time` is that of decay_time.
DYNEMB_HD int64_t decayed_occurrences(int64_t time, int64_t occurrences) {
  if (occurrences <= 0) return kNeverOccurred;
  int64_t sum = kNeverOccurred;
  for (auto rest = static_cast<uint64_t>(occurrences); rest != 0;) {
    const int bit = highest_bit(rest);
    sum = add_decayed(sum, int64_t{bit} << kDecayBits);
    rest ^= uint64_t{1} << bit;
  }
  return time + sum;
}

}  // namespace dynemb
