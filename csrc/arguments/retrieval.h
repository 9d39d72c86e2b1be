// Checked arguments of ops that sample ids and search for the largest scores.
#pragma once

#include <cstdint>

#include "arguments/tensors.h"

namespace dynemb {

// Raises unless `samples` is a valid number of ids to draw, and `seed` one word; returns its
// address.
const int64_t* sample_seed(const CallContext& call, const Tensor& seed, int64_t samples);

// Scores of candidates, and the best results of earlier candidates.
struct TopKTensors {
  const float* scores;       // [queries, candidates]
  const int64_t* ids;        // [candidates]
  const float* best_scores;  // [queries, k]
  const int64_t* best_ids;   // [queries, k]
  int64_t queries;
  int64_t candidates;
  int64_t k;
};
TopKTensors top_k_tensors(const CallContext& call, const Tensor& scores, const Tensor& ids,
                          const Tensor& best_scores, const Tensor& best_ids);

}  // namespace dynemb
