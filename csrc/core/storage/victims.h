// Victims of a cache: rows that lose their slots to the missing rows of a call.
//
//   worth       orders rows: first how often they were used, then how recently
//   threshold   follows from a histogram of worth: all rows of less worth are victims, and as many
//               of equal worth as are still needed
//   cursor      goes over the slots in order and takes victims, from where the last search ended
//
// No outcome depends on the order of threads: victims follow from slots alone, and slots are given
// to missing rows by the rank of their first occurrence.
#pragma once

#include "core/storage/cache.h"

namespace dynemb {

// -- worth ---------------------------------------------------------------------------------------

// Worth of a slot: first how often its row was used (counts are halved from time to time), then how
// recently. The least worth goes first.
constexpr int kWorthCounts = 64;
constexpr int kWorthAges = 64;
constexpr int kWorths = kWorthCounts * kWorthAges;

// Uses per slot after which counts are halved.
constexpr int64_t kUsesBeforeHalving = 8;

DYNEMB_HD int leading_zeros(uint32_t value) {  // of a value above 0
#if defined(__CUDA_ARCH__)
  return __clz(static_cast<int>(value));
#else
  return __builtin_clz(value);
#endif
}
// 2 log2(age), with one fractional bit.
DYNEMB_HD int age_class(uint32_t age) {
  if (age <= 1) return 0;
  const int log = 31 - leading_zeros(age);
  return 2 * log + static_cast<int>(age >> (log - 1) & 1);
}
DYNEMB_HD int slot_worth(int64_t use, uint32_t now) {
  const uint32_t count = use_count(use);
  const int counted = count < kWorthCounts ? static_cast<int>(count) : kWorthCounts - 1;
  return counted * kWorthAges + kWorthAges - 1 - age_class(now - use_epoch(use));
}
DYNEMB_HD int64_t halved_use(int64_t use) { return slot_use(use_epoch(use), use_count(use) / 2); }

// Whether a slot may be taken from its row: the last use of the row is of an earlier epoch.
DYNEMB_HD bool may_lose_slot(const int64_t* words, uint32_t now) {
  return words[kSlotOwner] > 0 && epoch_is_past(use_epoch(words[kSlotUse]), now);
}

// -- selection -----------------------------------------------------------------------------------

// A search takes one of so many slots at least, because it reads all of them.
constexpr int64_t kSlotsPerVictim = 64;

// Number of rows that have to lose their slots so that `wanted` others get one. `clock` is the row
// of the slab in tier_clock.
DYNEMB_HD int64_t wanted_victims(const int64_t* clock, int64_t wanted) {
  const int64_t untouched = clock[kTierLimit] - clock[kTierUsed];
  const int64_t missing = wanted - clock[kTierFreeCount] - (untouched > 0 ? untouched : 0);
  const int64_t least = clock[kTierLimit] / kSlotsPerVictim;
  return missing <= 0 ? 0 : missing > least ? missing : least;
}

struct VictimThreshold {
  int worth;        // rows of less worth are victims
  int64_t ties;     // so many rows of this worth are victims: the first that the cursor reaches
  int64_t victims;  // all of them
};
// The `wanted` rows of least worth, or all rows if there are fewer. `counts` [kWorths] is the
// histogram of the rows that may lose their slots.
DYNEMB_HD VictimThreshold pick_threshold(const int64_t* counts, int64_t wanted) {
  int worth = 0;
  int64_t below = 0;
  while (worth < kWorths - 1 && below + counts[worth] < wanted) below += counts[worth++];
  const int64_t left = wanted - below;
  const int64_t ties = counts[worth] < left ? counts[worth] : left;
  return {worth, ties, below + ties};
}
// `ties_before`: rows of the threshold's worth that the cursor has passed.
DYNEMB_HD bool is_victim(const VictimThreshold& threshold, int worth, int64_t ties_before) {
  return worth < threshold.worth || (worth == threshold.worth && ties_before < threshold.ties);
}

// The slot that a cursor reaches after `steps` of at most `used` slots.
DYNEMB_HD int64_t slot_after(int64_t cursor, int64_t steps, int64_t used) {
  const int64_t slot = (cursor < used ? cursor : 0) + steps;
  return slot < used ? slot : slot - used;
}

// -- slots for missing rows ----------------------------------------------------------------------

// Slots that are available to the missing rows of a call, in this order.
struct SlotSupply {
  int64_t free;       // on the stack of free slots
  int64_t used;       // the first untouched slot
  int64_t untouched;  // slots from there up to the limit
  int64_t victims;
};
DYNEMB_HD SlotSupply slot_supply(const int64_t* clock, int64_t victims) {
  const int64_t untouched = clock[kTierLimit] - clock[kTierUsed];
  return {clock[kTierFreeCount], clock[kTierUsed], untouched > 0 ? untouched : 0, victims};
}
// The slot of the missing row of rank `rank`: from the top of the stack, then untouched, then from
// a victim. The cache grows beyond its limit for further rows.
DYNEMB_HD int64_t slot_of_rank(const SlotSupply& supply, int64_t rank, const int32_t* free_slots,
                               const int32_t* victims) {
  if (rank < supply.free) return free_slots[supply.free - 1 - rank];
  const int64_t untouched = rank - supply.free;
  if (untouched < supply.untouched) return supply.used + untouched;
  const int64_t victim = untouched - supply.untouched;
  if (victim < supply.victims) return victims[victim];
  return supply.used + untouched - supply.victims;
}

// Numbers of slots that a call has taken from each source.
struct SlotCounts {
  int64_t free;
  int64_t untouched;  // also beyond the limit
  int64_t victims;
};
DYNEMB_HD SlotCounts given_slots(const SlotSupply& supply, int64_t wanted) {
  const int64_t free = wanted < supply.free ? wanted : supply.free;
  const int64_t rest = wanted - free - supply.untouched;
  if (rest <= 0) return {free, wanted - free, 0};
  const int64_t victims = rest < supply.victims ? rest : supply.victims;
  return {free, wanted - free - victims, victims};
}

}  // namespace dynemb
