// materialize_: writes the initial values of rows that have not been trained yet.
#include <torch/csrc/stable/library.h>

#include <optional>
#include <vector>

#include "cpu/index/args.h"
#include "cpu/index/one_writer.h"
#include "cpu/rows/copy_on_write.h"
#include "cpu/rows/initial_row.h"
#include "cpu/rows/state.h"

namespace dynemb::cpu {
namespace {

struct MaterializeJob {
  const TableView* index;
  const TableRows* table;
  const SlabState* state;
  float* scratch;  // a row
  float initial_state;
  int64_t begin;  // buckets
  int64_t end;
  int64_t written;  // out
};

DYNEMB_INLINE void materialize_buckets_body(MaterializeJob& job) {
  const TableRows& table = *job.table;
  for (int64_t bucket = job.begin; bucket < job.end; ++bucket) {
    const int64_t* line = job.index->line(bucket);
    for (int slot = 0; slot < kBucketWidth; ++slot) {
      if (line[kBucketWidth + slot] == 0) continue;
      const int64_t handle = decode_handle(line[kBucketWidth + slot]);
      const int64_t row = handle_row(handle);
      if (row < 0 || row >= table.rows) continue;  // lookups raise for it
      if (row_status(handle, table.generations[row]) != RowStatus::kUnwritten) continue;
      if (copies_on_write(*job.state)) {
        copy_before_write(*job.state, row, table.row(row), table.row_bytes);
      }
      write_initial_row(table, table.init_begin, table.init_count, line[slot], job.scratch);
      store_row(table.storage, kToNearest, job.scratch, table.dim, table.row(row));
      write_fresh_state(*job.state, row, table.dim, job.initial_state);
      table.generations[row] = handle_generation(handle);
      if (job.state->dirty_bits != nullptr) job.state->dirty_bits[row] = kDirtyForAll;
      ++job.written;
    }
  }
}
DYNEMB_SIMD_VARIANTS(materialize_buckets, (MaterializeJob & job), (job))

// Returns the number of rows written.
Tensor materialize_(std::vector<Tensor> weights, std::vector<Tensor> generations,
                    std::vector<Tensor> state, std::vector<Tensor> dirty_bits,
                    std::vector<Tensor> copy_on_write, Tensor buckets, Tensor tables, Tensor hyper,
                    Tensor meta, Tensor init_data) {
  const char* op = "materialize_";
  const IndexArgs index = index_args(op, buckets, nullptr, tables, meta);
  const auto rows = group_rows(op, weights, generations, meta, init_data);
  const double* numbers = hyper_tensor(op, hyper, index.table_count);
  const std::vector<SlabState> states =
      state_tensors(op, weights, state, dirty_bits, copy_on_write);
  Tensor result = zeros_cpu({1}, ScalarType::Long);
  auto* written = static_cast<int64_t*>(result.data_ptr());
  check_no_writer(op, index.tables);
  std::optional<OneWriter> writer;  // a row trained meanwhile must not be reset
  if (!weights.empty()) {
    writer.emplace(op, weights[0].data_ptr(), OneWriter::Others::kWait);
  }
  for (int64_t t = 0; t < index.table_count; ++t) {
    if (index.meta_row(t)[kMetaTiered] != 0) continue;  // rows outside of memory stay unwritten
    const TableView view = index.table(t);
    const TableRows& table = rows[t];
    const double initial = numbers[t * kHyperColumns + kHyperInitialState];
    constexpr int64_t kBucketsPerUnit = 512;
    const int64_t units = (view.bucket_count + kBucketsPerUnit - 1) / kBucketsPerUnit;
    std::vector<int64_t> unit_written(units, 0);
    parallel_units(units, view.bucket_count * kBucketWidth, [&](int64_t begin, int64_t end) {
      std::vector<float> scratch(static_cast<size_t>(table.dim));
      for (int64_t u = begin; u < end; ++u) {
        MaterializeJob job{&view,
                           &table,
                           &states[table.slab],
                           scratch.data(),
                           static_cast<float>(initial),
                           u * kBucketsPerUnit,
                           std::min((u + 1) * kBucketsPerUnit, view.bucket_count),
                           0};
        materialize_buckets(job);
        unit_written[u] = job.written;
      }
    });
    for (const int64_t n : unit_written) *written += n;
  }
  return result;
}

}  // namespace
}  // namespace dynemb::cpu

STABLE_TORCH_LIBRARY_IMPL(dynemb, CPU, m) {
  m.impl("materialize_", TORCH_BOX(&dynemb::cpu::materialize_));
}
