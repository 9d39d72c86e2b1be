// Rehash of tables on the device, decided there by a plan.
#pragma once

#include "cuda/index/args.h"
#include "cuda/index/plan.cuh"
#include "cuda/memory/table_memory.h"

namespace dynemb::cuda {

// The old content of the indexes under rehash, while it is placed again.
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

// Runs the rehashes of a plan, of at most `buckets` buckets; does nothing if the plan has none.
// `expected`: rehashes are likely, so the whole device works on them. Otherwise a single block
// does, which is launched faster than a grid, and is slow if there are rehashes after all.
void rehash(const Call& call, const IndexArgs& index, const Plan& plan, const Scratch& scratch,
            const OldIndexParts& parts, int64_t buckets, bool expected);

enum class Rehash {
  kGrow,     // if the table has fewer buckets than wanted
  kCompact,  // or as many, which drops its tombstones
  kShrink    // if it has more
};

// Rehashes one table into `wanted` buckets, if `when` says so; the memory must be mapped. `most`:
// upper bound of the table's buckets before and after.
void rehash_table(const Call& call, const IndexArgs& index, const SharedWords& shared,
                  int64_t table, int64_t wanted, Rehash when, int64_t most);

}  // namespace dynemb::cuda
