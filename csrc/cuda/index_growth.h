// Rehash of tables on the device, decided there by a plan.
#pragma once

#include "cuda/index_args.h"
#include "cuda/index_plan.cuh"
#include "cuda/table_memory.h"

namespace dynemb::cuda {

// The old content of the indexes that are rehashed, while it is placed again.
struct OldIndex {
  int64_t* lines;   // [buckets, kBucketWords]
  int64_t* scores;  // [buckets, score words, kBucketWidth]; nullptr: no scores
};
struct OldIndexParts {
  Scratch::Part<int64_t> lines;
  Scratch::Part<int64_t> scores;
  bool scored;
};
OldIndexParts add_old_index(Scratch* scratch, int64_t buckets, int64_t score_words);

// Runs the rehashes of a plan, of at most `buckets` buckets; does nothing where the plan has none.
void rehash(const Call& call, const IndexArgs& index, const Plan& plan, const Scratch& scratch,
            const OldIndexParts& parts, int64_t buckets);

// Rehashes one table so that it has at least `wanted` buckets; the memory must be mapped. If it has
// so many: `compact` rehashes it nevertheless, which drops its tombstones.
void grow_table(const Call& call, const IndexArgs& index, const SharedWords& shared, int64_t table,
                int64_t wanted, bool compact);

}  // namespace dynemb::cuda
