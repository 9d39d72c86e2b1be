// get_scores, set_scores_ and combine_scores_: scores of ids in the index.
#include <torch/csrc/stable/library.h>

#include <tuple>
#include <vector>

#include "arguments/combines.h"
#include "core/policy/combine.h"
#include "core/policy/decisions.h"
#include "cpu/index/args.h"
#include "cpu/index/one_writer.h"
#include "cpu/index/probe.h"

namespace dynemb::cpu {
namespace {

constexpr int64_t kIdsAhead = 16;  // between prefetch and visit of an id

// Calls visit(position in the call, score word of the slot, feature) for every id that is in its
// table, from many threads.
template <class F>
void visit_scores(const IndexArgs& index, const FeatureArgs& features, int64_t word,
                  const F& visit) {
  check_score_word(index.op, word, index.score_words);
  for (const int64_t t : features.table) {
    DYNEMB_CHECK(index.meta_row(t)[kMetaUnscored] == 0, "dynemb::", index.op, ": meta[", t,
                 ", UNSCORED] is ", index.meta_row(t)[kMetaUnscored],
                 ": no scores are kept of the ids of table ", t);
  }
  const std::vector<Tile> tiles = make_tiles(features);
  parallel_units(
      static_cast<int64_t>(tiles.size()), features.count, [&](int64_t begin, int64_t end) {
        for (int64_t k = begin; k < end; ++k) {
          const TableView table = index.table(tiles[k].table);
          for (int64_t i = tiles[k].begin; i < tiles[k].end; ++i) {
            if (i + kIdsAhead < tiles[k].end) {
              const uint64_t hash = first_hash(features.ids[i + kIdsAhead], table.salt);
              const int64_t bucket = bucket_of(hash, table.bucket_count);
              prefetch_line(table.line(bucket));
              prefetch_line_of(table.score(bucket, 0) + word * kBucketWidth);
            }
            const int64_t id = features.ids[i];
            const SlotPosition at = probe(table, id, first_hash(id, table.salt), 0);
            if (at.bucket >= 0)
              visit(i, table.score(at.bucket, at.slot) + word * kBucketWidth, tiles[k].feature);
          }
        }
      });
}

// Scores of ids (0 for missing ones), and which ids are in their tables.
std::tuple<Tensor, Tensor> get_scores(Tensor buckets, Tensor scores, Tensor tables, Tensor meta,
                                      Tensor ids, Tensor offsets,
                                      std::vector<int64_t> feature_tables, int64_t word) {
  const char* op = "get_scores";
  const IndexArgs index = index_args(op, buckets, &scores, tables, meta);
  const FeatureArgs features = feature_args(op, ids, offsets, feature_tables, index.table_count);
  Tensor values = zeros_cpu({features.count}, ScalarType::Long);
  Tensor found = zeros_cpu({features.count}, ScalarType::Bool);
  auto* value = static_cast<int64_t*>(values.data_ptr());
  auto* is_found = static_cast<bool*>(found.data_ptr());
  visit_scores(index, features, word, [&](int64_t i, const int64_t* score, int64_t /*feature*/) {
    value[i] = *score;
    is_found[i] = true;
  });
  return {values, found};
}

// Sets the scores of the ids in their tables, to the largest value given for an id; returns which
// ids are there.
Tensor set_scores_(Tensor buckets, Tensor scores, Tensor tables, Tensor meta, Tensor ids,
                   Tensor offsets, std::vector<int64_t> feature_tables, Tensor values,
                   int64_t word) {
  const char* op = "set_scores_";
  const IndexArgs index = index_args(op, buckets, &scores, tables, meta);
  const FeatureArgs features = feature_args(op, ids, offsets, feature_tables, index.table_count);
  const int64_t* value = id_words(op, "values", values, features.count);
  Tensor found = zeros_cpu({features.count}, ScalarType::Bool);
  const OneWriter writer(op, index.tables);
  auto* is_found = static_cast<bool*>(found.data_ptr());
  visit_scores(index, features, word, [&](int64_t i, int64_t* score, int64_t /*feature*/) {
    __atomic_store_n(score, INT64_MIN, __ATOMIC_RELAXED);
    is_found[i] = true;
  });
  visit_scores(index, features, word, [&](int64_t i, int64_t* score, int64_t /*feature*/) {
    int64_t seen = __atomic_load_n(score, __ATOMIC_RELAXED);
    while (seen < value[i] && !__atomic_compare_exchange_n(score, &seen, value[i], true,
                                                           __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
  });
  return found;
}

// Combines the custom scores of the ids in their tables with those that a lookup brings. Sums and
// maxima of an id commute, and the order of its occurrences does not matter.
void combine_scores_(Tensor buckets, Tensor scores, Tensor tables, Tensor meta, Tensor clock,
                     Tensor ids, Tensor offsets, std::vector<int64_t> feature_tables, Tensor values,
                     std::vector<int64_t> combines, std::vector<int64_t> half_lives, int64_t word) {
  const char* op = "combine_scores_";
  const IndexArgs index = index_args(op, buckets, &scores, tables, meta);
  const FeatureArgs features = feature_args(op, ids, offsets, feature_tables, index.table_count);
  const int64_t* value = id_words(op, "values", values, features.count);
  const CombineArgs combine =
      combine_args(op, index.table_count, clock, combines, half_lives, features.table.size());
  const OneWriter writer(op, index.tables);
  std::vector<int64_t> times;
  for (const int64_t half_life : half_lives) {
    times.push_back(decay_time_now(half_life, combine.clock));
  }
  if (combine.any_last) {
    visit_scores(index, features, word, [&](int64_t /*i*/, int64_t* score, int64_t feature) {
      if (combines[feature] == kCombineLast) __atomic_store_n(score, INT64_MIN, __ATOMIC_RELAXED);
    });
  }
  visit_scores(index, features, word, [&](int64_t i, int64_t* score, int64_t feature) {
    const int64_t how = combines[feature];
    if (how == kCombineNone) return;
    const int64_t brought = brought_score(how, value[i], times[feature]);
    int64_t seen = __atomic_load_n(score, __ATOMIC_RELAXED);
    for (;;) {
      const int64_t next = combined_score(how, seen, brought);
      if (next == seen || __atomic_compare_exchange_n(score, &seen, next, true, __ATOMIC_RELAXED,
                                                      __ATOMIC_RELAXED)) {
        return;
      }
    }
  });
}

}  // namespace
}  // namespace dynemb::cpu

STABLE_TORCH_LIBRARY_IMPL(dynemb, CPU, m) {
  m.impl("get_scores", TORCH_BOX(&dynemb::cpu::get_scores));
  m.impl("set_scores_", TORCH_BOX(&dynemb::cpu::set_scores_));
  m.impl("combine_scores_", TORCH_BOX(&dynemb::cpu::combine_scores_));
}
