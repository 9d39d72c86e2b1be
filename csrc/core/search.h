// Binary search. The result is in range even if the items do not ascend: offsets of a call may be
// any numbers.
#pragma once

#include "core/host_device.h"

namespace dynemb {

// The first i of [0, count) with holds(i), which stays true from there on; count if there is none.
template <class Condition>
DYNEMB_HD int64_t first_where(int64_t count, const Condition& holds) {
  int64_t low = 0;
  int64_t high = count;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (holds(middle)) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

}  // namespace dynemb
