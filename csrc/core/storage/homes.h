// Homes: rows of a slab in host memory that a GPU maps, below a cache in its own memory (HBM).
//
//   row of the tensors    0        slots                       slots + rows
//                         | slots  | homes of rows 0, 1, ...   |
//
// A row without a slot is read and written at its home, under the home handle
// (slots + row) : 36 | the row's generation : 28. So a call never fails for want of a slot.
//
//   row in    stored generation of its home      stored generation of the slot
//   home      as for rows in memory              -
//   slot      one ahead: home handles are stale  the slot's own if the row is written, else older
//
// Dirty bits for readers of changes are those of the slot or those of the home: a row that leaves a
// slot takes them along.
#pragma once

#include "core/storage/victims.h"

namespace dynemb {

// `places` of a row that is served at its home in an epoch. Until the epoch ends, gradients may
// come under its home handle, so it gets no slot.
constexpr int32_t kInPlace = -3;
constexpr uint32_t kInPlaceEpochs = uint32_t{1} << 20;
DYNEMB_HD int32_t in_place(uint32_t epoch) {
  return kInPlace - static_cast<int32_t>(epoch % kInPlaceEpochs);
}

// `places` of a missing row during a call: the first of its positions. Below all other values.
DYNEMB_HD int32_t place_claim(int64_t position) {
  return INT32_MIN + static_cast<int32_t>(position);
}
// kSlotOwner during a call, of a slot with a row that has another owner since.
DYNEMB_HD int64_t owner_claim(int64_t position) { return INT64_MIN + position; }

DYNEMB_HD int64_t home_of(int64_t slots, int64_t row) { return slots + row; }
DYNEMB_HD int64_t home_handle(int64_t slots, int64_t handle) {
  return make_handle(home_of(slots, handle_row(handle)), handle_generation(handle));
}

// Stored generation of the home of a row that has moved into a slot.
DYNEMB_HD int32_t left_generation(int64_t handle) {
  return static_cast<int32_t>(next_generation(handle_generation(handle)));
}
// Stored generation of the home of a row that has come back. 0: it was never written.
DYNEMB_HD int32_t returned_generation(int64_t handle, bool written) {
  return written ? handle_generation(handle) : 0;
}

// Slots that a search for victims looks at for each victim that it has to find: one of 64 is a
// victim, so most searches find enough.
constexpr int64_t kSlotsSearched = 96;
// Fewer slots are looked at all at once.
constexpr int64_t kLeastSearched = 1 << 16;

// Numbers of a call: what it takes from where. Filled by one thread at a time.
struct HomePlan {
  int64_t whole;     // 1: the call gets all the slots that it wants, or none
  int64_t wanted;    // missing rows
  int64_t victims;   // wanted, then found
  int64_t portion;   // size of the next histogram's portion; 0: the last one goes on
  int64_t halves;    // whether counts of uses are halved
  int64_t searched;  // slots that the search looks at, from the cursor on
  int64_t given;     // rows that get a slot
  SlotSupply supply;
};

// Before victims are searched. `slots`: as many may be used even beyond the limit.
DYNEMB_HD void begin_home_plan(int64_t* clock, int64_t wanted, bool whole, int64_t slots,
                               HomePlan* plan) {
  *plan = {whole ? 1 : 0, wanted, 0, 0, 0, 0, 0, slot_supply(clock, 0)};
  const int64_t untouched = slots - plan->supply.used;
  if (untouched > plan->supply.untouched) plan->supply.untouched = untouched;
  const int64_t missing = wanted - plan->supply.free - plan->supply.untouched;
  if (missing <= 0) return;
  plan->victims = missing;
  if (clock[kTierPortion] < missing) {
    plan->portion = wanted_victims(clock, wanted);
    plan->halves = clock[kTierTouches] >= kUsesBeforeHalving * clock[kTierLimit] ? 1 : 0;
    if (plan->halves != 0) clock[kTierTouches] = 0;
  }
  const int64_t most = missing * kSlotsSearched;
  const int64_t least = most > kLeastSearched ? most : kLeastSearched;
  plan->searched = least < clock[kTierUsed] ? least : clock[kTierUsed];
}

// The threshold of the next portion, from a histogram.
DYNEMB_HD void begin_portion(const int64_t* counts, const HomePlan& plan, int64_t* clock) {
  const VictimThreshold threshold = pick_threshold(counts, plan.portion);
  clock[kTierWorth] = threshold.worth;
  clock[kTierTies] = threshold.ties;
  clock[kTierPortion] = threshold.victims;
}

// After `found` victims, `ties` of them of the threshold's worth; `cursor`: the slot behind the
// last.
DYNEMB_HD void end_home_plan(int64_t* clock, int64_t found, int64_t ties, int64_t cursor,
                             HomePlan* plan) {
  const bool enough = found == plan->victims;
  plan->victims = plan->supply.victims = found;
  const int64_t supply = plan->supply.free + plan->supply.untouched + found;
  plan->given = plan->wanted < supply ? plan->wanted : supply;
  if (plan->whole != 0 && plan->given < plan->wanted) {
    plan->given = 0;
    return;
  }
  if (plan->searched > 0) {
    clock[kTierTies] -= ties;
    // what the search has not found has been used since the histogram
    clock[kTierPortion] = enough ? clock[kTierPortion] - found : 0;
    clock[kTierCursor] = cursor;
  }
  const SlotCounts given = given_slots(plan->supply, plan->given);
  clock[kTierFreeCount] -= given.free;
  clock[kTierUsed] += given.untouched;
  clock[kTierEvicted] += found;
  clock[kTierTouches] += plan->given;
  const int64_t in_use = clock[kTierUsed] - clock[kTierFreeCount];
  if (in_use > clock[kTierMostUsed]) clock[kTierMostUsed] = in_use;
}

}  // namespace dynemb
