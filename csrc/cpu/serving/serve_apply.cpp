// serve_apply_: updates a live table while other threads read it.
#include <torch/csrc/stable/library.h>

#include <vector>

#include "cpu/index/one_writer.h"
#include "cpu/runtime/scratch.h"
#include "cpu/serving/args.h"
#include "cpu/serving/live_codes.h"
#include "cpu/serving/live_writer.h"

namespace dynemb::cpu {
namespace {

void check_ids(const char* op, const char* name, const Tensor& ids) {
  check_words(op, name, ids);
  check_id_limit(op, ids.numel());
}

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
  check_ids(op, "ids", ids);
  check_ids(op, "erased", erased);
  const int64_t* m = live.meta_row(table);
  const LiveTable view = live_table(live, table);
  const bool packed_values = is_quantized(view.format) && values.scalar_type() == ScalarType::Byte;
  check_tensor(op, "values", values, packed_values ? ScalarType::Byte : ScalarType::Float);
  check_size(op, "values", values, 0, ids.numel());
  check_size(op, "values", values, 1,
             packed_values ? live_value_bytes(view.format, view.dim) : m[kMetaDim]);
  const auto* id = static_cast<const int64_t*>(ids.data_ptr());
  for (int64_t i = 0; m[kMetaHasPadding] != 0 && i < ids.numel(); ++i) {
    DYNEMB_CHECK(id[i] != m[kMetaPaddingId], "dynemb::", op, ": ids[", i, "] is ", id[i],
                 ", the padding id of table ", table, ", which has no row: leave it out");
  }
  const bool as_stored = view.format == Storage::kFloat32 &&
                         live_value_bytes(view.format, view.dim) == 8 * view.row_words;
  Scratch<int64_t> packed;
  packed.resize(static_cast<size_t>(as_stored ? 0 : ids.numel() * view.row_words));
  for (int64_t i = 0; !as_stored && i < ids.numel(); ++i) {
    int64_t* row = packed.data() + i * view.row_words;
    const bool held =
        packed_values ? copy_live_row(view.format,
                                      static_cast<const uint8_t*>(values.data_ptr()) +
                                          i * live_value_bytes(view.format, view.dim),
                                      view.dim, row)
                      : pack_live_row(view.format,
                                      static_cast<const float*>(values.data_ptr()) + i * view.dim,
                                      view.dim, row);
    DYNEMB_CHECK(held, "dynemb::", op, ": values[", i, "], the row of id ", id[i],
                 ", has NaN, infinity or a range that no scale of its format holds (int4: values "
                 "up to 65504): leave the id out, or make tables with rows of floats");
  }
  const LiveWriter writer{view, live.table_row(table), slabs + m[kMetaSlab] * kLiveSlabColumns};
  const OneWriter one_writer(op, slabs);
  const LiveOutcome outcome =
      apply_live(writer, {id, ids.numel(), as_stored ? values.data_ptr() : packed.data(),
                          static_cast<const int64_t*>(erased.data_ptr()), erased.numel()});
  Tensor counts = zeros_cpu({5}, ScalarType::Long);
  auto* count = static_cast<int64_t*>(counts.data_ptr());
  if (outcome.wanted <= outcome.free) {
    count[0] = outcome.inserted;
    count[1] = outcome.updated;
    count[2] = outcome.erased;
  }
  count[3] = outcome.wanted;
  count[4] = outcome.free;
  return counts;
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
