// The plan of an insertion, made by one block between finding the new ids and placing them.
#pragma once

#include "cuda/index/planned_call.h"
#include "cuda/index/policies.cuh"
#include "cuda/memory/table_memory.h"

namespace dynemb::cuda {

struct SlabArgs {
  int64_t* slabs;
  const int64_t* free_rows;
  int64_t max_rows;
  int64_t count;

  // Row number `row` of those that a call takes from slab s: freed rows first, last freed first.
  __device__ __forceinline__ int64_t row_handle(const Plan& plan, int64_t s, int64_t row) const {
    const int64_t free = plan.slab_free[s];
    return row < free ? free_rows[s * max_rows + free - 1 - row]
                      : first_owner(plan.slab_next[s] + row - free,
                                    slabs[s * kSlabColumns + kSlabGeneration]);
  }
};

// Decides how many new ids get rows and which indexes grow, checks memory, and advances the counts
// of tables and slabs. `placed_counts` is by block, as planned.block_counts; nullptr without
// policies.
void decide_insertion(const Call& call, const IndexArgs& index, const PolicyArgs& policies,
                      const SlabArgs& slabs, const PlannedCall& planned, const SharedWords& shared,
                      const InsertionRoom& room, int32_t* placed_counts);

}  // namespace dynemb::cuda
