// Order in which the gradients of a row are summed: by occurrence; a run longer than a piece is
// first summed piece by piece. All devices use this order, so the sums have the same bits.
#pragma once

#include "core/host_device.h"

namespace dynemb {

constexpr int64_t kPieceLength = 128;

}  // namespace dynemb
