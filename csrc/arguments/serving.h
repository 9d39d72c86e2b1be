// Checked arguments: the tensors of served tables. Live tables are read while they are updated.
#pragma once

#include <cstdint>
#include <vector>

#include "arguments/index.h"
#include "core/columns.h"
#include "core/serving/live_row.h"

namespace dynemb {

// The rows of one dim and format.
struct LiveRows {
  int64_t* words;  // [count, row_words]
  int64_t count;
  int64_t row_words;
  Storage format;
};

struct LiveTensors {
  IndexTensors index;
  std::vector<LiveRows> slabs;

  const int64_t* meta_row(int64_t table) const { return index.meta + table * kMetaColumns; }
  int64_t* table_row(int64_t table) const { return index.tables + table * kLiveTableColumns; }
};
// Raises unless a tensor is in host memory.
void check_served_memory(const char* op, const char* name, const Tensor& tensor);

// Also checks the constants of tables, but not the device.
LiveTensors live_tensors(const char* op, const Tensor& buckets, const Tensor& tables,
                         const Tensor& meta, const std::vector<Tensor>& weights,
                         const std::vector<int64_t>& formats);

// Values of missing ids; raises unless init_data has them for all tables.
const double* live_defaults(const char* op, const LiveTensors& live, const Tensor& init_data);

// The free rows of slabs [slabs, kLiveSlabColumns].
int64_t* live_slabs(const char* op, const LiveTensors& live, const Tensor& free);

}  // namespace dynemb
