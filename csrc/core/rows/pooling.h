#pragma once

#include <cstdint>

namespace dynemb {

// Ways of combining the ids of a bag into one vector; kPoolNone: one vector for each id.
enum Pooling : int64_t { kPoolSum = 0, kPoolMean = 1, kPoolNone = 2 };

}  // namespace dynemb
