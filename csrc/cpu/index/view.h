// The tensors of a group's index as pointers, checked, and the ids of a call split by feature.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <string>
#include <vector>

#include "arguments/tensors.h"
#include "core/columns.h"
#include "core/index/bucket.h"

namespace dynemb::cpu {

// Raises unless `tensor` is a contiguous CPU tensor of the dtype.
void check_tensor(const char* op, const char* name, const Tensor& tensor, ScalarType dtype);

Tensor empty_cpu(const std::vector<int64_t>& size, ScalarType dtype);
Tensor zeros_cpu(const std::vector<int64_t>& size, ScalarType dtype);

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

struct IndexView {
  const char* op;
  int64_t* buckets;
  int64_t bucket_capacity;  // buckets in the tensor
  int64_t* scores;
  int64_t score_words;
  int64_t* tables;
  const int64_t* meta;
  int64_t table_count;

  int64_t* table_row(int64_t table) const { return tables + table * kTableColumns; }
  const int64_t* meta_row(int64_t table) const { return meta + table * kMetaColumns; }
  TableView table(int64_t table) const;
};

// `scores` may be nullptr for ops that do not see them.
IndexView index_view(const char* op, const Tensor& buckets, const Tensor* scores,
                     const Tensor& tables, const Tensor& meta);

// Ids of a call: feature f owns ids [begin[f], begin[f + 1]) and is looked up in table[f].
struct FeatureIds {
  const int64_t* ids;
  int64_t count;
  std::vector<int64_t> begin;
  std::vector<int64_t> table;
};

// Checks dtype, shape and values of ids, offsets and feature_tables before anything is changed.
FeatureIds feature_ids(const char* op, const Tensor& ids, const Tensor& offsets,
                       const std::vector<int64_t>& feature_tables, int64_t table_count);

// Raises unless offset[0 .. parts] ascend from 0 to `count`, the number of `counted`.
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
std::vector<Tile> make_tiles(const FeatureIds& features);

// Runs f(begin, end) over [0, units) on torch's threads, or inline if `work` (in ids) is small.
constexpr int64_t kParallelWork = 2048;
template <class F>
void parallel_units(int64_t units, int64_t work, const F& f) {
  if (units <= 1 || work < kParallelWork) {
    if (units > 0) f(int64_t{0}, units);
    return;
  }
  torch::stable::parallel_for(0, units, 1, f);
}

}  // namespace dynemb::cpu
