// The parts of ragged rows that an op keeps.
#pragma once

#include "core/host_device.h"

namespace dynemb {

// The items of a row [begin, end) that stay if at most `most` do.
struct Kept {
  int64_t begin;
  int64_t count;
};
DYNEMB_HD Kept kept_of(int64_t begin, int64_t end, int64_t most, bool drop_left) {
  const int64_t length = end - begin;
  const int64_t count = length < most ? length : most;
  return {drop_left ? end - count : begin, count};
}

// Number of items at the end of a row [0, length) that equal a value in the bits of `mask`.
template <class T>
DYNEMB_HD int64_t without_trailing(const T* row, int64_t length, T bits, T mask) {
  while (length > 0 && (row[length - 1] & mask) == (bits & mask)) --length;
  return length;
}

}  // namespace dynemb
