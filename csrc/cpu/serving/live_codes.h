// Makes rows of live tables out of floats.
#pragma once

#include <cstring>

#include "core/serving/live_row.h"
#include "cpu/rows/storage.h"

namespace dynemb::cpu {

// Fills a row of live_row_words(format, dim) words but for its id and generation.
inline void pack_live_row(Storage format, const float* values, int64_t dim, int64_t* row) {
  std::memset(row, 0, 8 * static_cast<size_t>(live_row_words(format, dim)));
  store_row(format, kToNearest, values, dim, reinterpret_cast<char*>(row + kLiveHeaderWords));
}

}  // namespace dynemb::cpu
