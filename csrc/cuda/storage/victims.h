// Rows that lose their slots to the missing rows of a call; see core/storage/victims.h and homes.h.
#pragma once

#include "core/storage/homes.h"
#include "cuda/runtime/launch.h"
#include "cuda/storage/caches.h"

namespace dynemb::cuda {

// Scratch memory and kernels of one search.
class VictimSearch {
 public:
  // For at most `ids` missing rows.
  VictimSearch(const Call& call, Scratch* scratch, const CacheView& cache, int64_t ids);

  // Finds the victims of `plan`, on the device: their slots to `victims`, their number and that of
  // the rows that get a slot to the plan, both to the clock. `counted_as`: counter of these rows.
  void run(const Call& call, const Scratch& scratch, const CacheView& cache, TierColumn counted_as,
           HomePlan* plan, int32_t* victims) const;

 private:
  Scratch::Part<int64_t> worths_;
  Scratch::Part<uint64_t> counts_;
  Scratch::Part<int64_t> last_;
  Scratch::Part<char> temporary_;
  size_t temporary_bytes_ = 0;
  int64_t tiles_;  // most that a search looks at
};

}  // namespace dynemb::cuda
