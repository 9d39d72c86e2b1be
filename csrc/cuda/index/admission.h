// Admission of the new ids of a call, and counts of the others.
#pragma once

#include "cuda/index/insert_plan.h"

namespace dynemb::cuda {

// Sets the verdicts on the new ids and counts them; nothing else changes. `admit`: NewIds::wanted
// marks the ids that may get a row.
void decide_admission(const Call& call, const IndexArgs& index, const PolicyArgs& policies,
                      const PlannedCall& planned, const NewIds& new_ids, bool admit,
                      const int32_t* sketch, const int64_t* handles, int32_t* placed_counts);

// Counts ids that were not admitted, removes the exact counts of those that were, and gives out
// rows: fills `placed` and the handles of first occurrences.
void give_admitted_rows(const Call& call, const SlabArgs& slabs, const PlannedCall& planned,
                        const NewIds& new_ids, int32_t* sketch, int64_t* handles,
                        const int32_t* placed_counts, const PlacedIds& placed);

}  // namespace dynemb::cuda
