// serve_apply_: updates a live table while other threads read it.
#include <torch/csrc/stable/library.h>

#include <vector>

#include "cpu/index/one_writer.h"
#include "cpu/serving/args.h"
#include "cpu/serving/live_codes.h"
#include "cpu/serving/live_writer.h"

namespace dynemb::cpu {
namespace {

// Returns counts: inserted, updated, erased, rows wanted, rows free. If more rows are wanted than
// free, the first three are 0, and nothing has changed.
Tensor serve_apply_(Tensor buckets, Tensor tables, std::vector<Tensor> weights, Tensor free,
                    Tensor meta, int64_t table, Tensor ids, Tensor values, Tensor erased,
                    std::vector<int64_t> formats) {
  const char* op = "serve_apply_";
  check_served_memory(op, "buckets", buckets);
  check_served_memory(op, "tables", tables);
  for (const Tensor& rows : weights) check_served_memory(op, "weights", rows);
  const LiveTensors live = live_tensors(op, buckets, tables, meta, weights, formats);
  int64_t* slabs = live_slabs(op, live, free);
  check_table_number(op, table, live.index.table_count);
  check_words(op, "ids", ids), check_id_limit(op, ids.numel());
  check_words(op, "erased", erased), check_id_limit(op, erased.numel());
  const int64_t* m = live.meta_row(table);
  const LiveTable view = live_table(live, table);
  const PackedRows rows(op, view, table, ids, values,
                        m[kMetaHasPadding] != 0 ? m + kMetaPaddingId : nullptr);
  const LiveWriter writer{view, live.table_row(table), slabs + m[kMetaSlab] * kLiveSlabColumns};
  const OneWriter one_writer(op, slabs);
  const LiveOutcome outcome =
      apply_live(writer, {static_cast<const int64_t*>(ids.data_ptr()), ids.numel(), rows.data(),
                          static_cast<const int64_t*>(erased.data_ptr()), erased.numel()});
  return outcome_counts(outcome);
}

}  // namespace
}  // namespace dynemb::cpu

STABLE_TORCH_LIBRARY_IMPL(dynemb, CPU, m) {
  m.impl("serve_apply_", TORCH_BOX(&dynemb::cpu::serve_apply_));
}
// For error messages about a GPU's tensors, also in builds without CUDA kernels.
STABLE_TORCH_LIBRARY_IMPL(dynemb, CUDA, m) {
  m.impl("serve_apply_", TORCH_BOX(&dynemb::cpu::serve_apply_));
}
