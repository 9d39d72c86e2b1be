// The file FORMAT of a store, in JSON: the layout of its segments.
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

// Raises if PATH/FORMAT has another version, or differs from `format` for a slab with segments.
// Slabs without segments may change or be new.
void check_format(const std::string& path, const StoreFormat& format);

// Replaces PATH/FORMAT if it differs; durable when it returns.
void write_format(const std::string& path, const StoreFormat& format);

}  // namespace dynemb::cpu
