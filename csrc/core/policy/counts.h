// Upper limit of saved counts: far from overflow, whatever a call adds.
#pragma once

#include "core/host_device.h"

namespace dynemb {

constexpr int64_t kMaxCount = int64_t{1} << 62;

DYNEMB_HD int64_t next_count(int64_t count) { return count < kMaxCount ? count + 1 : kMaxCount; }
// Applies next_count `more` times.
DYNEMB_HD int64_t add_count(int64_t count, int64_t more) {
  if (more == 0) return count;
  return count < kMaxCount - more ? count + more : kMaxCount;
}

}  // namespace dynemb
