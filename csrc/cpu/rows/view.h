// The row tensors of a group as pointers, and what a lookup call says about its features.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "core/columns.h"
#include "core/index/handle.h"
#include "core/rows/initializer.h"
#include "core/rows/storage.h"
#include "cpu/index/view.h"
#include "cpu/runtime/simd.h"

namespace dynemb::cpu {

// How the ids of a bag become one vector; kNone: every id keeps its own.
enum Pooling : int64_t { kPoolSum = 0, kPoolMean = 1, kPoolNone = 2 };

// One table's rows: the slab they lie in and how new ones begin.
struct TableRows {
  char* weights;         // [rows, dim]
  int32_t* generations;  // [rows]
  int64_t rows;
  int64_t dim;
  Storage storage;    // of the weights
  int64_t row_bytes;  // of the weights
  int64_t slab;
  int64_t seed;
  int64_t first_column;  // in the rows of a wider table
  const double* init_data;
  int64_t init_begin;
  int64_t init_count;
  int64_t default_begin;
  int64_t default_count;
  int64_t refused_begin;
  int64_t refused_count;

  char* row(int64_t number) const { return weights + number * row_bytes; }
};

// How a tensor of rows or state stores its values; raises unless it is float32,
// bfloat16 or float16.
Storage storage_of(const char* op, const char* argument, const Tensor& tensor);
int64_t storage_bytes(Storage storage);  // of one value; not for kBlockFloat8

// Checks the tensors and returns one entry per table.
std::vector<TableRows> table_rows(const char* op, const std::vector<Tensor>& weights,
                                  const std::vector<Tensor>& generations, const Tensor& meta,
                                  const Tensor& init_data);

// One lookup call: ids by feature, handles, bags, weights of the ids.
struct Lookup {
  FeatureIds features;
  const int64_t* handles;
  const int64_t* offsets;   // [features * batch + 1]
  const float* id_weights;  // nullptr: all 1
  int64_t batch;
  int64_t pooling;
  std::vector<int64_t> column;  // first output column of each feature
  int64_t columns;              // row width of output and gradient
};

// Checks everything that depends on the call, also that handles name rows that exist. For kPoolNone
// all features have the same dim, and offsets only separate them.
Lookup lookup_call(const char* op, const std::vector<TableRows>& tables, const Tensor& ids,
                   const Tensor& handles, const Tensor& offsets,
                   const std::optional<Tensor>& per_sample_weights,
                   const std::vector<int64_t>& feature_tables,
                   const std::vector<int64_t>& feature_dims, int64_t pooling);

// A range of bags of one feature: the unit of parallel work in lookups.
struct BagTile {
  int64_t feature;
  int64_t begin;
  int64_t end;
};
std::vector<BagTile> make_bag_tiles(const Lookup& lookup);

// Divisor of every bag under mean pooling (number of ids, or sum of their weights, without
// padding), as its reciprocal; 0 for an empty bag.
void bag_scale(const Lookup& lookup, int64_t bag, float* scale);

}  // namespace dynemb::cpu
