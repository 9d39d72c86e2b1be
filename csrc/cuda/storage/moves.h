// Rows that move between their homes in host memory and slots in HBM.
#pragma once

#include "core/storage/homes.h"
#include "cuda/runtime/launch.h"
#include "cuda/storage/caches.h"

namespace dynemb::cuda {

// A slot that gets another row.
struct StagedMove {
  int64_t slot;
  int64_t owner;   // before, as in kSlotOwner; 0: none
  int64_t marks;   // before
  int64_t handle;  // of the row that it gets
};

// Does the first `plan->given` of `moves`, at most `most`.
void move_rows(const Call& call, const CacheView& cache, const HomePlan* plan,
               const StagedMove* moves, int64_t most);

}  // namespace dynemb::cuda
