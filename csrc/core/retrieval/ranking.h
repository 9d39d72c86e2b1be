// The order of results of a search: the larger score, then the lesser id.
#pragma once

#include <cmath>

#include "core/host_device.h"

namespace dynemb {

// A score of an id that may be a result: neither NaN nor that of an id to leave out.
DYNEMB_HD bool is_candidate(float score) { return score > -INFINITY; }

DYNEMB_HD bool ranks_before(float score, int64_t id, float other, int64_t other_id) {
  return score > other || (score == other && id < other_id);
}

constexpr int64_t kNoResult = -1;  // id of a place without a result, with the score -infinity

}  // namespace dynemb
