// How many rows a lookup that inserts will want in the cache, before it has inserted anything.
#pragma once

#include <cstdint>
#include <vector>

#include "arguments/tiers.h"
#include "cpu/index/args.h"

namespace dynemb::cpu {

// At least as many of slab s at s; 0 where it has no cache. Looks nothing up: every occurrence of
// an id counts as a row that is not in the cache.
std::vector<int64_t> most_wanted_rows(const TierTensors& tiers, const FeatureArgs& features,
                                      const std::vector<int64_t>& slab_of);

// The same by a look at the index and the cache: rows that are there do not count, others do once.
// What is too much are ids that will be refused a row, and those that get the row of an evicted id
// which is in the cache.
std::vector<int64_t> wanted_rows(const char* op, const TierTensors& tiers, const IndexArgs& index,
                                 const FeatureArgs& features, const std::vector<int64_t>& slab_of);

}  // namespace dynemb::cpu
