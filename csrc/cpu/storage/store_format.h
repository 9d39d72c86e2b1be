// The file FORMAT of a store, in JSON: what its segments look like.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cpu/storage/segment_files.h"

namespace dynemb::cpu {

constexpr uint32_t kStoreVersion = 1;

struct StoreFormat {
  int64_t segment_bytes;
  std::vector<SlabFormat> slabs;
};

// Raises where PATH/FORMAT is of another version, or says something else than `format` of slabs
// that have segments. Slabs without any may change, and there may be new ones.
void check_format(const std::string& path, const StoreFormat& format);

// Replaces PATH/FORMAT unless it says the same; durable when it returns.
void write_format(const std::string& path, const StoreFormat& format);

}  // namespace dynemb::cpu
