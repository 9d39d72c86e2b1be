// Quantiles of the normal distribution for the columns of a row.
#pragma once

#include <cstdint>

namespace dynemb::cpu {

// value[c] = normal_quantile(q[c], tail[c]) for c below `count`. All have room for kInitChunk
// floats, of which those from `count` on may be read and changed.
void normal_quantiles(const float* q, const float* tail, int64_t count, float* value);

}  // namespace dynemb::cpu
