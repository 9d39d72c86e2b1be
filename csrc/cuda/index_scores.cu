// get_scores and set_scores_: scores of ids, wherever they lie in the index.
#include <tuple>

#include "cuda/index_args.h"

namespace dynemb::cuda {
namespace {

// A thread per id. As find_ids (index_find.cu), and 8 bytes of score at random, 9 in order. `given`
// nullptr: reads scores into `values`.
__global__ void visit_scores(IndexArgs index, FeatureArgs features, ErrorSink errors,
                             int64_t threads, const int64_t* given, int64_t* values, bool* found) {
  const int64_t i = thread_number();
  if (i >= threads) return;
  check_offset(features, errors, i);
  if (i >= features.count) return;
  const int64_t id = features.ids[i];
  const int64_t t = features.table[features.features == 1 ? 0 : features.feature_of(i)];
  const TableView table = table_view(index, t);
  const FoundSlot at = find_slot(table, id);
  found[i] = at.stored != 0;
  if (given == nullptr) {
    values[i] = at.stored != 0 ? *table.score(at.bucket, at.slot) : 0;
  } else if (at.stored != 0) {
    *table.score(at.bucket, at.slot) = given[i];
  }
}

// Which ids are there.
Tensor run(const Call& call, const Tensor& buckets, const Tensor& scores, const Tensor& tables,
           const Tensor& meta, const Tensor& ids, const Tensor& offsets,
           const std::vector<int64_t>& feature_tables, const int64_t* given, int64_t* values) {
  const IndexArgs index = index_args(call, buckets, &scores, tables, meta);
  STD_TORCH_CHECK(index.scores != nullptr, "dynemb::", call.op,
                  ": the index keeps no scores: create the tables with score=\"step\"");
  Scratch scratch;
  const auto words = scratch.add<int64_t>(static_cast<int64_t>(feature_tables.size()));
  scratch.allocate(call);
  const FeatureArgs features =
      feature_args(call, ids, offsets, feature_tables, index.table_count, scratch.get(words));
  Tensor found = call.empty({features.count}, ScalarType::Bool);
  upload_words(call, feature_tables, scratch.get(words));
  const int64_t threads = features.threads();
  call.launch(visit_scores, threads, 0, index, features, error_sink(call), threads, given, values,
              static_cast<bool*>(found.data_ptr()));
  return found;
}

// Scores of ids (0 for those that are not there), and which are there.
std::tuple<Tensor, Tensor> get_scores(Tensor buckets, Tensor scores, Tensor tables, Tensor meta,
                                      Tensor ids, Tensor offsets,
                                      std::vector<int64_t> feature_tables) {
  const Call call("get_scores", "buckets", buckets);
  call.check("ids", ids, ScalarType::Long);
  Tensor values = call.empty({ids.numel()}, ScalarType::Long);
  Tensor found = run(call, buckets, scores, tables, meta, ids, offsets, feature_tables, nullptr,
                     static_cast<int64_t*>(values.data_ptr()));
  return {values, found};
}

// Sets the scores of the ids that are there, which must be distinct; returns which are.
Tensor set_scores_(Tensor buckets, Tensor scores, Tensor tables, Tensor meta, Tensor ids,
                   Tensor offsets, std::vector<int64_t> feature_tables, Tensor values) {
  const Call call("set_scores_", "buckets", buckets);
  call.check("values", values, ScalarType::Long);
  check_size(call.op, "values", values, 0, ids.numel());
  return run(call, buckets, scores, tables, meta, ids, offsets, feature_tables,
             static_cast<const int64_t*>(values.data_ptr()), nullptr);
}

}  // namespace
}  // namespace dynemb::cuda

DYNEMB_IMPLEMENT_OPS(m) {
  m.impl("get_scores", TORCH_BOX(&dynemb::cuda::get_scores));
  m.impl("set_scores_", TORCH_BOX(&dynemb::cuda::set_scores_));
}
