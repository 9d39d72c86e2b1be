// The end of a training step, as the tables of a group count steps.
#pragma once

#include "core/columns.h"
#include "core/policy/counts.h"
#include "core/policy/decisions.h"

namespace dynemb {

// `extra`: of row_clock, behind the tables. `now`: seconds, nullptr: the time stays.
DYNEMB_HD void advance_clocks(int64_t* clock, int64_t* extra, const int64_t* now) {
  clock[kClockStep] = next_count(clock[kClockStep]);
  if (now != nullptr) clock[kClockNow] = *now;
  extra[kRowClockSinceStep] = 0;
}

}  // namespace dynemb
