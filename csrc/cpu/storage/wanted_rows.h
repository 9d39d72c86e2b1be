// Number of rows that an inserting lookup will need in the cache, before it has inserted anything.
#pragma once

#include <cstdint>
#include <vector>

#include "arguments/tiers.h"
#include "cpu/index/args.h"

namespace dynemb::cpu {

// Upper bound by slab; 0 without a cache. Without any search: every occurrence of an id counts as a
// row outside the cache.
std::vector<int64_t> most_wanted_rows(const TierTensors& tiers, const FeatureArgs& features,
                                      const std::vector<int64_t>& slab_of);

// A closer bound by searching the index and the cache: cached rows do not count, others count once.
// It overestimates by ids that will be refused a row, and by those that get the row of an evicted
// id in the cache.
std::vector<int64_t> wanted_rows(const char* op, const TierTensors& tiers, const IndexArgs& index,
                                 const FeatureArgs& features, const std::vector<int64_t>& slab_of);

}  // namespace dynemb::cpu
