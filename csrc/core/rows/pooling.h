#pragma once

#include <cstdint>

namespace dynemb {

// How the ids of a bag become one vector; kPoolNone: every id keeps its own.
enum Pooling : int64_t { kPoolSum = 0, kPoolMean = 1, kPoolNone = 2 };

}  // namespace dynemb
