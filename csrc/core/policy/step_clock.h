// End of a training step: the clocks of a group's tables.
#pragma once

#include "core/columns.h"
#include "core/policy/counts.h"
#include "core/policy/decisions.h"

namespace dynemb {

// `extra`: of row_clock, behind the tables. `now`: seconds; nullptr: unchanged.
DYNEMB_HD void advance_clocks(int64_t* clock, int64_t* extra, const int64_t* now) {
  clock[kClockStep] = next_count(clock[kClockStep]);
  if (now != nullptr) clock[kClockNow] = *now;
  extra[kRowClockSinceStep] = 0;
}

}  // namespace dynemb
