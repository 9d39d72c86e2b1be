// merge_top_k: the best of candidates and of earlier results, query by query.
#include <tuple>

#include "arguments/retrieval.h"
#include "core/retrieval/ranking.h"
#include "cuda/runtime/device.cuh"
#include "cuda/runtime/launch.h"

namespace dynemb::cuda {
namespace {

// Inserts a result into a list of k in order, if it is better than the last.
__device__ __forceinline__ void insert_result(float score, int64_t id, int64_t k, float* scores,
                                              int64_t* ids) {
  if (!is_candidate(score)) return;
  if (!ranks_before(score, id, scores[k - 1], ids[k - 1]) && is_candidate(scores[k - 1])) return;
  int64_t rank = k - 1;
  for (; rank > 0; --rank) {
    const float above = scores[rank - 1];
    if (is_candidate(above) && !ranks_before(score, id, above, ids[rank - 1])) break;
    scores[rank] = above;
    ids[rank] = ids[rank - 1];
  }
  scores[rank] = score;
  ids[rank] = id;
}

// A thread per query. Few candidates of a later call are better than the best so far, so most are
// read and compared once.
__global__ void merge_queries(TopKTensors given, float* out_scores, int64_t* out_ids) {
  const int64_t query = thread_number();
  if (query >= given.queries) return;
  float* scores = out_scores + query * given.k;
  int64_t* ids = out_ids + query * given.k;
  for (int64_t rank = 0; rank < given.k; ++rank) {
    scores[rank] = -INFINITY;
    ids[rank] = kNoResult;
  }
  for (int64_t i = query * given.k; i < (query + 1) * given.k; ++i) {
    insert_result(given.best_scores[i], given.best_ids[i], given.k, scores, ids);
  }
  const float* candidates = given.scores + query * given.candidates;
  for (int64_t i = 0; i < given.candidates; ++i) {
    insert_result(candidates[i], given.ids[i], given.k, scores, ids);
  }
}

std::tuple<Tensor, Tensor> merge_top_k(Tensor scores, Tensor ids, Tensor best_scores,
                                       Tensor best_ids) {
  const Call call("merge_top_k", "scores", scores);
  const TopKTensors given = top_k_tensors(call, scores, ids, best_scores, best_ids);
  Tensor out_scores = call.empty({given.queries, given.k}, ScalarType::Float);
  Tensor out_ids = call.empty({given.queries, given.k}, ScalarType::Long);
  if (given.k > 0) {
    call.launch(merge_queries, given.queries, 0, given, static_cast<float*>(out_scores.data_ptr()),
                static_cast<int64_t*>(out_ids.data_ptr()));
  }
  return {out_scores, out_ids};
}

}  // namespace
}  // namespace dynemb::cuda

DYNEMB_IMPLEMENT_OPS(m) { m.impl("merge_top_k", TORCH_BOX(&dynemb::cuda::merge_top_k)); }
