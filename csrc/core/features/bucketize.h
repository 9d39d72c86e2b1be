// The interval between boundaries that a value lies in.
#pragma once

#include "core/search.h"

namespace dynemb {

// Number of ascending boundaries that are at most `value`; all, if it is NaN. Binary search.
template <class T>
DYNEMB_HD int64_t bucket_of_value(const T* boundaries, int64_t count, T value) {
  return first_where(count, [&](int64_t i) { return boundaries[i] > value; });
}

}  // namespace dynemb
