// The index of a group and the ids of a call by feature, for ops of the CPU.
#pragma once

#include <cstdint>
#include <vector>

#include "arguments/index.h"
#include "core/columns.h"
#include "core/index/bucket.h"
#include "cpu/runtime/parallel.h"
#include "cpu/runtime/results.h"

namespace dynemb::cpu {

// One table of the index. Pointers are to its first bucket.
struct TableView {
  int64_t* lines;
  int64_t* scores;  // nullptr: the index keeps no scores
  int64_t score_words;
  int64_t bucket_count;
  uint64_t salt;
  bool has_padding;
  int64_t padding_id;

  int64_t* line(int64_t bucket) const { return lines + bucket * kBucketWords; }
  // Words of a slot are kBucketWidth apart.
  int64_t* score(int64_t bucket, int64_t slot) const {
    return scores + bucket * kBucketWidth * score_words + slot;
  }
};

struct IndexArgs : IndexTensors {
  const char* op;

  int64_t* table_row(int64_t table) const { return tables + table * kTableColumns; }
  const int64_t* meta_row(int64_t table) const { return meta + table * kMetaColumns; }
  TableView table(int64_t table) const;
};

// Also checks the constants of tables. `scores` may be nullptr for ops that do not use them.
IndexArgs index_args(const char* op, const Tensor& buckets, const Tensor* scores,
                     const Tensor& tables, const Tensor& meta);

// Ids of a call: feature f has ids [begin[f], begin[f + 1]) and is looked up in table[f].
struct FeatureArgs {
  const int64_t* ids;
  int64_t count;
  std::vector<int64_t> begin;
  std::vector<int64_t> table;
};

// Also checks the values of offsets.
FeatureArgs feature_args(const char* op, const IdTensors& ids,
                         const std::vector<int64_t>& feature_tables);
FeatureArgs feature_args(const char* op, const Tensor& ids, const Tensor& offsets,
                         const std::vector<int64_t>& feature_tables, int64_t table_count);

// Raises unless offset[0 .. parts] ascends from 0 to `count`, the number of `counted`.
void check_offsets(const char* op, const int64_t* offset, int64_t parts, int64_t count,
                   const char* counted);

// At most kTileIds consecutive ids of one feature: the unit of parallel work.
constexpr int64_t kTileIds = 4096;
struct Tile {
  int64_t begin;
  int64_t end;
  int64_t table;
  int64_t feature;
};
std::vector<Tile> make_tiles(const FeatureArgs& features);

}  // namespace dynemb::cpu
