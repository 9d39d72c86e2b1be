// serve_lookup: lookups in frozen tables, and in live ones, which another thread may update
// meanwhile. Finding ids and reading their rows is one op. So both overlap in memory, and the
// handle of a live table, which is valid only until the next update, does not leave the op.
#include <torch/csrc/stable/library.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "cpu/serving/args.h"
#include "cpu/serving/frozen_reader.h"
#include "cpu/serving/live_reader.h"
#include "cpu/serving/serve_call.h"

namespace dynemb::cpu {
namespace {

// How rows are found, how they are stored, and how rows begin that are not there.

struct FrozenSource {
  TableView index;
  TableRows rows;

  int64_t slot_bytes() const { return 0; }  // rows are read in place
  template <class Sink>
  DYNEMB_INLINE int64_t read(const int64_t* ids, int64_t count, char*, Sink& sink) const {
    return read_frozen(index, rows, ids, count, sink);
  }
  std::string damage(int64_t) const {
    return "its index leads to a row beyond the " + std::to_string(rows.rows) +
           " of its slab. Freeze the model again";
  }
};

struct LiveSource {
  LiveTable table;
  TableRows rows;  // of missing ids

  int64_t slot_bytes() const { return live_slot_bytes(table); }
  template <class Sink>
  DYNEMB_INLINE int64_t read(const int64_t* ids, int64_t count, char* slots, Sink& sink) const {
    return read_live<true>(table, ids, count, slots, sink);
  }
  std::string damage(int64_t id) const {
    return "its index leads from id " + std::to_string(id) + " to a row beyond the " +
           std::to_string(table.row_count) + " of its slab. Make the table again from the model";
  }
};

std::tuple<Tensor, Tensor> serve_lookup(Tensor buckets, Tensor tables, Tensor meta,
                                        std::vector<Tensor> weights, Tensor init_data, Tensor ids,
                                        Tensor offsets, std::optional<Tensor> per_sample_weights,
                                        std::vector<int64_t> feature_tables,
                                        std::vector<int64_t> feature_dims, int64_t pooling,
                                        std::vector<int64_t> formats, bool live) {
  const char* op = "serve_lookup";
  const ServeArguments given{tables,         meta,         ids,    offsets, per_sample_weights,
                             feature_tables, feature_dims, pooling};
  check_served_memory(op, "buckets", buckets);
  check_served_memory(op, "tables", tables);
  for (const Tensor& rows : weights) check_served_memory(op, "weights", rows);
  if (live) {
    const LiveTensors tensors = live_tensors(op, buckets, tables, meta, weights, formats);
    const double* defaults = live_defaults(op, tensors, init_data);
    std::vector<LiveSource> sources;
    for (int64_t t = 0; t < tensors.index.table_count; ++t) {
      sources.push_back({live_table(tensors, t), live_initial_rows(tensors, t, defaults)});
    }
    return serve(op, given, sources, [](const FeatureArgs&) {});
  }
  const IndexArgs index = index_args(op, buckets, nullptr, tables, meta);
  const std::vector<TableRows> rows =
      group_rows(op, frozen_row_tensors(op, weights, meta, init_data, formats));
  std::vector<FrozenSource> sources;
  for (int64_t t = 0; t < index.table_count; ++t) sources.push_back({index.table(t), rows[t]});
  return serve(op, given, sources, [](const FeatureArgs&) {});
}

}  // namespace
}  // namespace dynemb::cpu

STABLE_TORCH_LIBRARY_IMPL(dynemb, CPU, m) {
  m.impl("serve_lookup", TORCH_BOX(&dynemb::cpu::serve_lookup));
}
// For error messages about a GPU's tensors, also in builds without CUDA kernels.
STABLE_TORCH_LIBRARY_IMPL(dynemb, CUDA, m) {
  m.impl("serve_lookup", TORCH_BOX(&dynemb::cpu::serve_lookup));
}
