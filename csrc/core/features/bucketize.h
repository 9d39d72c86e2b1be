// Which of the intervals between boundaries a value lies in.
#pragma once

#include "core/host_device.h"

namespace dynemb {

// How many boundaries, which ascend, are at most `value`; all, if it is NaN. Binary search.
template <class T>
DYNEMB_HD int64_t bucket_of_value(const T* boundaries, int64_t count, T value) {
  int64_t low = 0;
  int64_t high = count;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (boundaries[middle] > value) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

}  // namespace dynemb
