// The random words of a row's initial value, many at a time.
#pragma once

#include <cstdint>

namespace dynemb::cpu {

constexpr int64_t kInitChunk = 64;  // columns with random words made together

// Writes the words of columns [first_column, first_column + columns) of an id's row; first_column
// is a multiple of 4. At most kInitChunk columns; all kInitChunk words of `words` may change.
void random_words(int64_t seed, int64_t id, int64_t first_column, int64_t columns, uint32_t* words);

}  // namespace dynemb::cpu
