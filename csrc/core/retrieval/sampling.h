// Random slots of an index. A sample tries slots until it finds an occupied one, so each live id
// has the same probability. What it tries depends on (seed, sample, try) alone.
#pragma once

#include "core/index/hash.h"

namespace dynemb {

// A sample without a live id after so many tries takes the id of a random rank: at a load of 10 %
// one sample in 850.
constexpr int kSampleTries = 64;

// Draw `draw` of a sample, at most kSampleTries: a counter through a mixer, as in SplitMix64
// (Steele, Lea and Flood, 2014).
DYNEMB_HD uint64_t sample_word(int64_t seed, int64_t sample, int draw) {
  constexpr uint64_t kDraws = kSampleTries + 1;
  const uint64_t counter = static_cast<uint64_t>(sample) * kDraws + static_cast<uint64_t>(draw);
  return fmix64(fmix64(static_cast<uint64_t>(seed)) + 0x9e3779b97f4a7c15ULL * (counter + 1));
}

// The slot of try `attempt`, of `slots`.
DYNEMB_HD int64_t sampled_slot(int64_t seed, int64_t sample, int attempt, int64_t slots) {
  return static_cast<int64_t>(
      multiply_high(sample_word(seed, sample, attempt), static_cast<uint64_t>(slots)));
}

// The rank among `live` ids in the order of their slots.
DYNEMB_HD int64_t sampled_rank(int64_t seed, int64_t sample, int64_t live) {
  return sampled_slot(seed, sample, kSampleTries, live);
}

}  // namespace dynemb
