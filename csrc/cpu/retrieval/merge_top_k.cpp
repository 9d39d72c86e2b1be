// merge_top_k: the best of candidates and of earlier results, query by query.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "arguments/retrieval.h"
#include "core/retrieval/ranking.h"
#include "cpu/runtime/parallel.h"
#include "cpu/runtime/results.h"
#include "cpu/runtime/simd.h"

namespace dynemb::cpu {
namespace {

constexpr int64_t kScanned = 32;  // scores that are compared with the threshold at once
constexpr int64_t kSpare = 1024;  // candidates beyond k, before the worst are dropped

struct Result {
  float score;
  int64_t id;
};

bool before(const Result& a, const Result& b) { return ranks_before(a.score, a.id, b.score, b.id); }

// The best k of what has been added, in any order.
class BestResults {
 public:
  explicit BestResults(int64_t k) : k_(k) { kept_.reserve(static_cast<size_t>(k + kSpare)); }

  void clear() {
    kept_.clear();
    threshold_ = {-INFINITY, kNoResult};
    full_ = false;
  }
  float threshold() const { return threshold_.score; }

  void add(float score, int64_t id) {
    if (!is_candidate(score)) return;
    if (full_ && !before({score, id}, threshold_)) return;
    kept_.push_back({score, id});
    if (static_cast<int64_t>(kept_.size()) >= k_ + kSpare) drop_worst();
  }

  // Drops what is not among the best k, which sets the threshold.
  void drop_worst() {
    if (static_cast<int64_t>(kept_.size()) < k_) return;
    const auto last = kept_.begin() + (k_ - 1);
    std::nth_element(kept_.begin(), last, kept_.end(), before);
    kept_.resize(static_cast<size_t>(k_));
    threshold_ = kept_.back();
    full_ = true;
  }

  // The best results in order.
  const std::vector<Result>& sorted() {
    drop_worst();
    std::sort(kept_.begin(), kept_.end(), before);
    return kept_;
  }

 private:
  int64_t k_;
  std::vector<Result> kept_;
  Result threshold_{-INFINITY, kNoResult};  // the worst of the best k
  bool full_ = false;                       // k results have been added
};

struct Scan {
  const float* scores;
  float threshold;
  int64_t at;   // the block to begin with; then the first that has a score from the threshold on
  int64_t end;  // a multiple of kScanned after `at`
};

DYNEMB_INLINE void find_reaching_body(Scan* scan) {
  for (; scan->at < scan->end; scan->at += kScanned) {
    int reached = 0;
    for (int64_t u = 0; u < kScanned; ++u) {
      reached |= scan->scores[scan->at + u] >= scan->threshold ? 1 : 0;
    }
    if (reached != 0) return;
  }
}
DYNEMB_SIMD_VARIANTS(find_reaching, (Scan * scan), (scan))

void merge_query(const TopKTensors& given, int64_t query, BestResults* best, float* out_scores,
                 int64_t* out_ids) {
  best->clear();
  for (int64_t i = query * given.k; i < (query + 1) * given.k; ++i) {
    best->add(given.best_scores[i], given.best_ids[i]);
  }
  const float* scores = given.scores + query * given.candidates;
  best->drop_worst();
  const int64_t whole = given.candidates / kScanned * kScanned;
  Scan scan{scores, best->threshold(), 0, whole};
  for (find_reaching(&scan); scan.at < whole; find_reaching(&scan)) {
    for (int64_t u = scan.at; u < scan.at + kScanned; ++u) best->add(scores[u], given.ids[u]);
    scan.threshold = best->threshold();
    scan.at += kScanned;
  }
  for (int64_t i = whole; i < given.candidates; ++i) best->add(scores[i], given.ids[i]);
  const std::vector<Result>& results = best->sorted();
  const auto count = static_cast<int64_t>(results.size());
  for (int64_t rank = 0; rank < given.k; ++rank) {
    out_scores[query * given.k + rank] = rank < count ? results[rank].score : -INFINITY;
    out_ids[query * given.k + rank] = rank < count ? results[rank].id : kNoResult;
  }
}

std::tuple<Tensor, Tensor> merge_top_k(Tensor scores, Tensor ids, Tensor best_scores,
                                       Tensor best_ids) {
  const TopKTensors given = top_k_tensors("merge_top_k", scores, ids, best_scores, best_ids);
  Tensor out_scores = empty_cpu({given.queries, given.k}, ScalarType::Float);
  Tensor out_ids = empty_cpu({given.queries, given.k}, ScalarType::Long);
  if (given.k == 0) return {out_scores, out_ids};
  parallel_units(given.queries, given.queries * given.candidates, [&](int64_t begin, int64_t end) {
    BestResults best(given.k);
    for (int64_t query = begin; query < end; ++query) {
      merge_query(given, query, &best, static_cast<float*>(out_scores.data_ptr()),
                  static_cast<int64_t*>(out_ids.data_ptr()));
    }
  });
  return {out_scores, out_ids};
}

}  // namespace
}  // namespace dynemb::cpu

STABLE_TORCH_LIBRARY_IMPL(dynemb, CPU, m) {
  m.impl("merge_top_k", TORCH_BOX(&dynemb::cpu::merge_top_k));
}
