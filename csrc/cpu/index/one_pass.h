// Insertion in one pass: ids are found and get rows and places while their lines are in the cache.
#pragma once

#include <cstdint>

#include "cpu/index/args.h"
#include "cpu/index/policy_args.h"
#include "cpu/rows/allocator.h"

namespace dynemb::cpu {

// Whether one pass gives the same integers as the rounds: no table has a policy, and even if every
// id of the call were new, no index would grow, and all rows would be given out for the first time.
bool fits_one_pass(const IndexArgs& index, const FeatureArgs& features, const PolicyArgs& policies,
                   const RowAllocator& allocator);

// Whether one thread in one pass is faster than two threads in rounds: if most ids of a large call
// are new, judged by a sample.
bool one_thread_beats_two(const IndexArgs& index, const FeatureArgs& features);

// Finds all ids of a call, on one thread, and gives rows and places to new ones. Requires
// fits_one_pass.
void insert_in_one_pass(const IndexArgs& index, const FeatureArgs& features,
                        const PolicyArgs& policies, RowAllocator* allocator, int64_t* handles);

}  // namespace dynemb::cpu
