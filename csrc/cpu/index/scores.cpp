// get_scores, set_scores_ and combine_scores_: scores of ids in the index.
#include <torch/csrc/stable/library.h>

#include <algorithm>
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

void check_scored(const IndexArgs& index, const FeatureArgs& features, int64_t word) {
  check_score_word(index.op, word, index.score_words);
  for (const int64_t t : features.table) {
    DYNEMB_CHECK(index.meta_row(t)[kMetaUnscored] == 0, "dynemb::", index.op, ": meta[", t,
                 ", UNSCORED] is ", index.meta_row(t)[kMetaUnscored],
                 ": no scores are kept of the ids of table ", t);
  }
}

// Calls visit(position in the call, score word of the slot, or nullptr if the id is missing) for
// the ids of a tile that wanted(hash) chooses.
template <class Wanted, class F>
void visit_tile(const IndexArgs& index, const FeatureArgs& features, const Tile& tile, int64_t word,
                const Wanted& wanted, const F& visit) {
  const TableView table = index.table(tile.table);
  for (int64_t i = tile.begin; i < tile.end; ++i) {
    if (i + kIdsAhead < tile.end) {
      const uint64_t ahead = first_hash(features.ids[i + kIdsAhead], table.salt);
      if (wanted(ahead)) {
        const int64_t bucket = bucket_of(ahead, table.bucket_count);
        prefetch_line(table.line(bucket));
        prefetch_line_of(table.score(bucket, 0) + word * kBucketWidth);
      }
    }
    const int64_t id = features.ids[i];
    const uint64_t hash = first_hash(id, table.salt);
    if (!wanted(hash)) continue;
    const SlotPosition at = probe(table, id, hash, 0);
    visit(i, at.bucket < 0 ? nullptr : table.score(at.bucket, at.slot) + word * kBucketWidth);
  }
}

// Calls visit(position in the call, score word of the slot, feature) for every id that is in its
// table: all occurrences of an id on one thread, in order. Each thread goes over all ids, because
// hashing them takes much less than finding them.
template <class F>
void visit_scores(const IndexArgs& index, const FeatureArgs& features, int64_t word,
                  const F& visit) {
  const std::vector<Tile> tiles = make_tiles(features);
  const auto parts =
      static_cast<uint64_t>(features.count < kParallelWork ? 1 : torch::stable::get_num_threads());
  parallel_units(static_cast<int64_t>(parts), features.count, [&](int64_t begin, int64_t end) {
    for (auto part = static_cast<uint64_t>(begin); part < static_cast<uint64_t>(end); ++part) {
      const auto of_part = [&](uint64_t hash) { return (hash >> 32) * parts >> 32 == part; };
      for (const Tile& tile : tiles) {
        visit_tile(index, features, tile, word, of_part, [&](int64_t i, int64_t* score) {
          if (score != nullptr) visit(i, score, tile.feature);
        });
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
  check_scored(index, features, word);
  Tensor values = empty_cpu({features.count}, ScalarType::Long);
  Tensor found = empty_cpu({features.count}, ScalarType::Bool);
  auto* value = static_cast<int64_t*>(values.data_ptr());
  auto* is_found = static_cast<bool*>(found.data_ptr());
  const std::vector<Tile> tiles = make_tiles(features);
  const auto tile_count = static_cast<int64_t>(tiles.size());
  read_between_moves(op, index.tables, [&] {
    parallel_units(tile_count, features.count, [&](int64_t begin, int64_t end) {
      for (int64_t k = begin; k < end; ++k) {
        read_unmoved(index.tables, [&] {
          visit_tile(
              index, features, tiles[k], word, [](uint64_t) { return true; },
              [&](int64_t i, const int64_t* score) {
                value[i] = score == nullptr ? 0 : *score;
                is_found[i] = score != nullptr;
              });
        });
      }
    });
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
  check_scored(index, features, word);
  const int64_t* value = id_words(op, "values", values, features.count);
  Tensor found = zeros_cpu({features.count}, ScalarType::Bool);
  const OneWriter writer(op, index.tables);
  auto* is_found = static_cast<bool*>(found.data_ptr());
  visit_scores(index, features, word, [&](int64_t i, int64_t* score, int64_t /*feature*/) {
    *score = INT64_MIN;
    is_found[i] = true;
  });
  visit_scores(index, features, word, [&](int64_t i, int64_t* score, int64_t /*feature*/) {
    *score = std::max(*score, value[i]);
  });
  return found;
}

// Combines the custom scores of the ids in their tables with those that a lookup brings, in the
// order of occurrence: decayed sums are rounded.
void combine_scores_(Tensor buckets, Tensor scores, Tensor tables, Tensor meta, Tensor clock,
                     Tensor ids, Tensor offsets, std::vector<int64_t> feature_tables, Tensor values,
                     std::vector<int64_t> combines, std::vector<int64_t> half_lives, int64_t word) {
  const char* op = "combine_scores_";
  const IndexArgs index = index_args(op, buckets, &scores, tables, meta);
  const FeatureArgs features = feature_args(op, ids, offsets, feature_tables, index.table_count);
  check_scored(index, features, word);
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
      if (combines[feature] == kCombineLast) *score = INT64_MIN;
    });
  }
  visit_scores(index, features, word, [&](int64_t i, int64_t* score, int64_t feature) {
    const int64_t how = combines[feature];
    if (how == kCombineNone) return;
    *score = combined_score(how, *score, brought_score(how, value[i], times[feature]));
  });
}

}  // namespace
}  // namespace dynemb::cpu

STABLE_TORCH_LIBRARY_IMPL(dynemb, CPU, m) {
  m.impl("get_scores", TORCH_BOX(&dynemb::cpu::get_scores));
  m.impl("set_scores_", TORCH_BOX(&dynemb::cpu::set_scores_));
  m.impl("combine_scores_", TORCH_BOX(&dynemb::cpu::combine_scores_));
}
