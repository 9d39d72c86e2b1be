// The rows of a group by table, and a lookup, for ops of the CPU.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "arguments/lookup.h"
#include "arguments/rows.h"
#include "core/index/handle.h"
#include "core/rows/initializer.h"
#include "cpu/index/args.h"
#include "cpu/runtime/simd.h"

namespace dynemb::cpu {

// One table's rows: their slab and their initializers.
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

// One entry per table. Also checks the constants of tables.
std::vector<TableRows> group_rows(const char* op, const RowTensors& rows);
inline std::vector<TableRows> group_rows(const char* op, const std::vector<Tensor>& weights,
                                         const std::vector<Tensor>& generations, const Tensor& meta,
                                         const Tensor& init_data) {
  return group_rows(op, row_tensors(op, weights, generations, meta, init_data));
}

// One lookup call: ids by feature, handles, bags, weights of the ids.
struct LookupArgs {
  FeatureArgs features;
  const int64_t* handles;
  const int64_t* offsets;   // [features * batch + 1]; not for kPoolNone
  const float* id_weights;  // nullptr: all 1
  int64_t batch;
  int64_t pooling;
  std::vector<int64_t> column;  // first output column of each feature
  int64_t columns;              // row width of output and gradient
};

// Also checks that dims are those of the tables, and that the rows of handles exist.
LookupArgs lookup_call(const char* op, const std::vector<TableRows>& tables, const Tensor& ids,
                       const Tensor& handles, const Tensor& offsets,
                       const std::optional<Tensor>& per_sample_weights,
                       const std::vector<int64_t>& feature_tables,
                       const std::vector<int64_t>& feature_dims, int64_t pooling);

// The same for handles that are not known yet; set_handles checks and adds them.
LookupArgs lookup_before_handles(const char* op, const std::vector<TableRows>& tables,
                                 const Tensor& ids, const Tensor& offsets,
                                 const std::optional<Tensor>& per_sample_weights,
                                 const std::vector<int64_t>& feature_tables,
                                 const std::vector<int64_t>& feature_dims, int64_t pooling);
void set_handles(const char* op, const std::vector<TableRows>& tables, const Tensor& handles,
                 LookupArgs* lookup);

// A range of bags of one feature: the unit of parallel work in lookups.
struct BagTile {
  int64_t feature;
  int64_t begin;
  int64_t end;
};
std::vector<BagTile> make_bag_tiles(const LookupArgs& lookup);

// Divisor of a bag under mean pooling: its number of ids, or the sum of their weights, without
// padding.
MeanDivisor bag_divisor(const LookupArgs& lookup, int64_t bag);

}  // namespace dynemb::cpu
