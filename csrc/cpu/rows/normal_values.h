// Normal and truncated normal values of the columns of a row.
#pragma once

#include <cstdint>

#include "core/rows/initializer.h"

namespace dynemb::cpu {

constexpr int64_t kWidestVector = 16;  // floats

// row[c] = normal_value(words[c], p) for c below `count`, which is at most kInitChunk. Reads words
// up to the next multiple of kWidestVector.
void normal_values(const InitParameters& p, const uint32_t* words, int64_t count, float* row);

// The same with truncated_normal_value.
void truncated_normal_values(const InitParameters& p, const uint32_t* words, int64_t count,
                             float* row);

}  // namespace dynemb::cpu
