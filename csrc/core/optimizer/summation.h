// How the gradients of a row are summed: in order of occurrence, except that a run longer than a
// piece is summed piece by piece first. The same on every device, so the sums have the same bits.
#pragma once

#include "core/host_device.h"

namespace dynemb {

constexpr int64_t kPieceLength = 128;

}  // namespace dynemb
