// Eviction of ids from full tables, in favour of new ones.
#pragma once

#include "cuda/index/insert_plan.h"

namespace dynemb::cuda {

// Log of evicted ids; see EvictedColumn.
struct EvictionLog {
  int64_t* words;
  int64_t records;  // capacity
};

// Finds a victim for each of the placed ids that need one, and gives it the victim's row with its
// next generation. An id without a victim is refused, and counted if its policy counts ids; the
// exact count of the others is removed. `victims` [ids] is scratch memory, `counts` is that of
// NewIds.
void evict(const Call& call, const PlannedCall& planned, const EvictionLog& log,
           const PlacedIds& placed, int64_t* victims, int64_t* counts, int32_t* sketch,
           int64_t* handles);

}  // namespace dynemb::cuda
