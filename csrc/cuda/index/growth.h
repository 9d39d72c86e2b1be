// Rehash of tables on the device, decided there by a plan.
#pragma once

#include "cuda/index/args.h"
#include "cuda/index/plan.cuh"
#include "cuda/memory/table_memory.h"

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
// `expected`: probably there are some, so all of the device works on them; otherwise a single
// block, which is launched in less time than a grid is, and slow if there are some after all.
void rehash(const Call& call, const IndexArgs& index, const Plan& plan, const Scratch& scratch,
            const OldIndexParts& parts, int64_t buckets, bool expected);

enum class Rehash {
  kGrow,     // if the table has fewer buckets than wanted
  kCompact,  // or as many: that drops its tombstones
  kShrink    // if it has more
};

// Rehashes one table into `wanted` buckets, if that is what `when` says; the memory must be mapped.
// `most` is the most buckets that a table has before or after it.
void rehash_table(const Call& call, const IndexArgs& index, const SharedWords& shared,
                  int64_t table, int64_t wanted, Rehash when, int64_t most);

}  // namespace dynemb::cuda
