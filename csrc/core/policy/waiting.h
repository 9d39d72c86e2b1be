// Exact counts of ids that wait for admission: occurrences, or decayed ones with a half-life.
#pragma once

#include "core/policy/decisions.h"

namespace dynemb {

// With a half-life a counter stores a logarithm (core/policy/decay.h) plus 1,024 half-lives. So it
// is above 0, as in every occupied slot, even if a load with another half-life makes the logarithm
// negative.
constexpr int64_t kWaitingBase = int64_t{1024} << kDecayBits;
// Logarithms are rounded: a count admits from a millionth below the threshold on.
constexpr int64_t kThresholdSlack = int64_t{1} << 10;

// The logarithm of an occurrence now; 0 without a half-life.
DYNEMB_HD int64_t waiting_time(const int64_t* policy, const int64_t* clock) {
  const int64_t half_life = policy[kPolicyAdmissionHalfLife];
  return half_life == 0 ? 0 : decay_time_now(half_life, clock);
}

// What a counter stores after further occurrences. `time`: of waiting_time; `stored`: before them;
// 0: no counter.
DYNEMB_HD int64_t add_waiting(const int64_t* policy, int64_t time, int64_t stored,
                              int64_t occurrences) {
  if (policy[kPolicyAdmissionHalfLife] == 0) return add_frequency(stored, occurrences);
  if (occurrences <= 0) return stored;
  const int64_t added = kWaitingBase + decayed_occurrences(time, occurrences);
  const int64_t sum = stored > 0 ? add_decayed(stored, added) : added;
  return sum < kMaxCount ? sum : kMaxCount;
}

// The least stored count that admits its id now.
DYNEMB_HD int64_t least_admitted(const int64_t* policy, int64_t time, int64_t threshold) {
  if (policy[kPolicyAdmissionHalfLife] == 0) return threshold;
  return kWaitingBase + decayed_occurrences(time, threshold) - kThresholdSlack;
}

// Initial frequency of an admitted id: all counted occurrences. Of a decayed count only the
// threshold is known, and the occurrences of the call. `stored`: of its counter or sketch before
// the call; 0: not counted.
DYNEMB_HD int64_t admitted_frequency(const int64_t* policy, int64_t stored, int64_t occurrences,
                                     int64_t threshold) {
  int64_t frequency = stored + occurrences;
  if (policy[kPolicyAdmissionHalfLife] != 0 && stored != 0) {
    frequency = threshold > occurrences ? threshold : occurrences;
  }
  return frequency < INT32_MAX ? frequency : INT32_MAX;
}

}  // namespace dynemb
