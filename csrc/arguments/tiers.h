// Checked arguments: the caches of a group, as pointers into memory.
#pragma once

#include <cstdint>
#include <vector>

#include "arguments/tensors.h"

namespace dynemb {

struct CacheSlab {
  int32_t* places;  // [max_rows], slot + 1 of each row; nullptr: the slab has no cache
  int64_t max_rows;
  int64_t* slots;       // [max_rows, kSlotColumns]
  int32_t* free_slots;  // [max_rows], the stack of free slots
  int64_t* clock;       // [kTierColumns], the slab's row of tier_clock
};

struct TierTensors {
  std::vector<CacheSlab> slabs;
  int64_t* head;  // [kTierColumns], the first row of tier_clock
};

// Raises unless a tensor of tiered tables is in host memory: tiered tables have CPU kernels only.
void check_tier_memory(const char* op, const char* name, const Tensor& tensor);

TierTensors tier_tensors(const CallContext& call, const std::vector<Tensor>& places,
                         const std::vector<Tensor>& slots, const std::vector<Tensor>& free_slots,
                         const Tensor& tier_clock);

// The slab of each table, from `meta` int64 [tables, kMetaColumns].
std::vector<int64_t> slabs_of_tables(const CallContext& call, const Tensor& meta, size_t slabs);

// Raises unless `slab` has a cache.
const CacheSlab& cached_slab(const char* op, const TierTensors& tiers, int64_t slab);

}  // namespace dynemb
