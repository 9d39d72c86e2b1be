// Ids and bags of many features, before they are concatenated.
#pragma once

#include "core/host_device.h"

namespace dynemb {

// One feature of a call. All members are 8 bytes: kernels read it from a list of words.
struct FeatureBags {
  const void* ids;      // int64, or int32 where ids_wide is 0
  const void* offsets;  // int64 or int32 likewise
  int64_t ids_wide;
  int64_t offsets_wide;
  int64_t entry;    // of offsets in their list; -1: none, but bags of `length` ids each
  int64_t has_end;  // offsets end with the number of ids
  int64_t length;
  int64_t begin;  // of its ids among those of all
  int64_t count;  // of its ids
};
constexpr int64_t kFeatureBagsWords = sizeof(FeatureBags) / 8;

DYNEMB_HD int64_t integer_at(const void* data, int64_t wide, int64_t i) {
  return wide != 0 ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
}

// Where bag `bag` begins among the ids of its feature; for the bag after the last, where it would
// begin.
DYNEMB_HD int64_t bag_offset(const FeatureBags& feature, int64_t bag, int64_t bags) {
  if (feature.entry < 0) return bag * feature.length;
  if (bag == bags && feature.has_end == 0) return feature.count;
  return integer_at(feature.offsets, feature.offsets_wide, bag);
}

// The same among the ids of all features.
DYNEMB_HD int64_t bag_begin(const FeatureBags& feature, int64_t bag, int64_t bags) {
  // unsigned, because offsets may be any number: the op that takes the result checks them
  return static_cast<int64_t>(static_cast<uint64_t>(feature.begin) +
                              static_cast<uint64_t>(bag_offset(feature, bag, bags)));
}

// Whether the first, or the last, bag of a feature ends at the right place. Otherwise ids would
// move into the bags of the next feature.
DYNEMB_HD bool begins_right(const FeatureBags& feature, int64_t bags) {
  return bag_offset(feature, 0, bags) == 0;
}
DYNEMB_HD bool ends_right(const FeatureBags& feature, int64_t bags) {
  return bag_offset(feature, bags, bags) == feature.count;
}

}  // namespace dynemb
