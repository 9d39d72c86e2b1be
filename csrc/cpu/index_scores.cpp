// get_scores and set_scores_: scores of ids, wherever they lie in the index.
#include <torch/csrc/stable/library.h>

#include <tuple>
#include <vector>

#include "cpu/index_probe.h"
#include "cpu/index_view.h"

namespace dynemb::cpu {
namespace {

// Calls visit(position in the call, score of the slot) for every id that is in its table, from many
// threads.
template <class F>
void visit_scores(const IndexView& index, const FeatureIds& features, const F& visit) {
  STD_TORCH_CHECK(index.scores != nullptr, "dynemb::", index.op,
                  ": the index keeps no scores: create the tables with score=\"step\"");
  const std::vector<Tile> tiles = make_tiles(features);
  parallel_units(static_cast<int64_t>(tiles.size()), features.count,
                 [&](int64_t begin, int64_t end) {
                   for (int64_t k = begin; k < end; ++k) {
                     const TableView table = index.table(tiles[k].table);
                     for (int64_t i = tiles[k].begin; i < tiles[k].end; ++i) {
                       const int64_t id = features.ids[i];
                       const SlotPosition at = probe(table, id, first_hash(id, table.salt), 0);
                       if (at.bucket >= 0)
                         visit(i, table.scores + at.bucket * kBucketWidth + at.slot);
                     }
                   }
                 });
}

// Scores of ids (0 for those that are not there), and which are there.
std::tuple<Tensor, Tensor> get_scores(Tensor buckets, Tensor scores, Tensor tables, Tensor meta,
                                      Tensor ids, Tensor offsets,
                                      std::vector<int64_t> feature_tables) {
  const char* op = "get_scores";
  const IndexView index = index_view(op, buckets, &scores, tables, meta);
  const FeatureIds features = feature_ids(op, ids, offsets, feature_tables, index.table_count);
  Tensor values = zeros_cpu({features.count}, ScalarType::Long);
  Tensor found = zeros_cpu({features.count}, ScalarType::Bool);
  auto* value = static_cast<int64_t*>(values.data_ptr());
  auto* is_found = static_cast<bool*>(found.data_ptr());
  visit_scores(index, features, [&](int64_t i, const int64_t* score) {
    value[i] = *score;
    is_found[i] = true;
  });
  return {values, found};
}

// Sets the scores of the ids that are there, which must be distinct; returns which are.
Tensor set_scores_(Tensor buckets, Tensor scores, Tensor tables, Tensor meta, Tensor ids,
                   Tensor offsets, std::vector<int64_t> feature_tables, Tensor values) {
  const char* op = "set_scores_";
  const IndexView index = index_view(op, buckets, &scores, tables, meta);
  const FeatureIds features = feature_ids(op, ids, offsets, feature_tables, index.table_count);
  check_tensor(op, "values", values, ScalarType::Long);
  check_size(op, "values", values, 0, features.count);
  Tensor found = zeros_cpu({features.count}, ScalarType::Bool);
  const auto* value = static_cast<const int64_t*>(values.data_ptr());
  auto* is_found = static_cast<bool*>(found.data_ptr());
  visit_scores(index, features, [&](int64_t i, int64_t* score) {
    *score = value[i];
    is_found[i] = true;
  });
  return found;
}

}  // namespace
}  // namespace dynemb::cpu

STABLE_TORCH_LIBRARY_IMPL(dynemb, CPU, m) {
  m.impl("get_scores", TORCH_BOX(&dynemb::cpu::get_scores));
  m.impl("set_scores_", TORCH_BOX(&dynemb::cpu::set_scores_));
}
