// get_scores and set_scores_: scores of ids in the index.
#include <tuple>

#include "cuda/index/args.h"

namespace dynemb::cuda {
namespace {

// A thread per id. As find_ids (find.cu); calls visit(position, score word of the slot, or nullptr
// if the id is missing).
template <class F>
__device__ __forceinline__ void visit_score(const IndexArgs& index, const FeatureArgs& features,
                                            int64_t word, const F& visit) {
  const int64_t i = thread_number();
  if (i >= features.count) return;
  const int64_t id = features.ids[i];
  const int64_t t = features.table_of(i);
  const TableView table = table_view(index, t);
  const FoundSlot at = find_slot(table, id);
  // a table without scores has none to visit: the CPU, which can read meta, raises
  const bool scored = at.stored != 0 && table.scores != nullptr;
  visit(i, scored ? table.score(at.bucket, at.slot) + word * kBucketWidth : nullptr);
}

// 8 bytes of score at random, 9 in order.
__global__ void read_scores(IndexArgs index, FeatureArgs features, ErrorSink errors,
                            int64_t threads, int64_t word, int64_t* values, bool* found) {
  if (thread_number() < threads) check_offset(features, errors, thread_number());
  visit_score(index, features, word, [&](int64_t i, const int64_t* score) {
    found[i] = score != nullptr;
    values[i] = score == nullptr ? 0 : *score;
  });
}

// The least value, so that raise_scores leaves the largest of those given for an id. 8 bytes of
// score at random, 1 in order.
__global__ void clear_scores(IndexArgs index, FeatureArgs features, ErrorSink errors,
                             int64_t threads, int64_t word, bool* found) {
  if (thread_number() < threads) check_offset(features, errors, thread_number());
  visit_score(index, features, word, [&](int64_t i, int64_t* score) {
    found[i] = score != nullptr;
    if (score != nullptr) *score = INT64_MIN;
  });
}

// One atomic at random, 8 bytes in order.
__global__ void raise_scores(IndexArgs index, FeatureArgs features, int64_t word,
                             const int64_t* values) {
  visit_score(index, features, word, [&](int64_t i, int64_t* score) {
    if (score == nullptr) return;
    atomicMax(reinterpret_cast<long long*>(score), static_cast<long long>(values[i]));
  });
}

// The index and the ids of a call, checked.
struct ScoreCall {
  IndexArgs index;
  FeatureArgs features;
  Scratch scratch;

  ScoreCall(const Call& call, const Tensor& buckets, const Tensor& scores, const Tensor& tables,
            const Tensor& meta, const Tensor& ids, const Tensor& offsets,
            const std::vector<int64_t>& feature_tables, int64_t word)
      : index(index_args(call, buckets, &scores, tables, meta)) {
    features = feature_args(call, ids, offsets, feature_tables, index.table_count, nullptr);
    check_score_word(call.op, word, index.score_words);
    const auto words = scratch.add<int64_t>(features.features);
    scratch.allocate(call);
    upload_words(call, feature_tables, scratch.get(words));
    features.table = scratch.get(words);
  }
};

// Scores of ids (0 for missing ones), and which ids are in their tables.
std::tuple<Tensor, Tensor> get_scores(Tensor buckets, Tensor scores, Tensor tables, Tensor meta,
                                      Tensor ids, Tensor offsets,
                                      std::vector<int64_t> feature_tables, int64_t word) {
  const Call call("get_scores", "buckets", buckets);
  const ScoreCall scored(call, buckets, scores, tables, meta, ids, offsets, feature_tables, word);
  Tensor values = call.empty({scored.features.count}, ScalarType::Long);
  Tensor found = call.empty({scored.features.count}, ScalarType::Bool);
  const int64_t threads = scored.features.threads();
  call.launch(read_scores, threads, 0, scored.index, scored.features, error_sink(call), threads,
              word, static_cast<int64_t*>(values.data_ptr()), static_cast<bool*>(found.data_ptr()));
  return {values, found};
}

// Sets the scores of the ids in their tables, to the largest value given for an id; returns which
// ids are there.
Tensor set_scores_(Tensor buckets, Tensor scores, Tensor tables, Tensor meta, Tensor ids,
                   Tensor offsets, std::vector<int64_t> feature_tables, Tensor values,
                   int64_t word) {
  const Call call("set_scores_", "buckets", buckets);
  const ScoreCall scored(call, buckets, scores, tables, meta, ids, offsets, feature_tables, word);
  const int64_t* value = id_words(call, "values", values, scored.features.count);
  Tensor found = call.empty({scored.features.count}, ScalarType::Bool);
  const int64_t threads = scored.features.threads();
  call.launch(clear_scores, threads, 0, scored.index, scored.features, error_sink(call), threads,
              word, static_cast<bool*>(found.data_ptr()));
  call.launch(raise_scores, scored.features.count, 0, scored.index, scored.features, word, value);
  return found;
}

}  // namespace
}  // namespace dynemb::cuda

DYNEMB_IMPLEMENT_OPS(m) {
  m.impl("get_scores", TORCH_BOX(&dynemb::cuda::get_scores));
  m.impl("set_scores_", TORCH_BOX(&dynemb::cuda::set_scores_));
}
