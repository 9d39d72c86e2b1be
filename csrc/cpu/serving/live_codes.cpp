#include "cpu/serving/live_codes.h"

#include "core/runtime/check.h"

namespace dynemb::cpu {

PackedRows::PackedRows(const char* op, const LiveTable& table, int64_t number, const Tensor& ids,
                       const Tensor& values, const int64_t* padding_id) {
  const int64_t bytes = live_value_bytes(table.format, table.dim);
  const bool given_packed = is_quantized(table.format) && values.scalar_type() == ScalarType::Byte;
  check_tensor(op, "values", values, given_packed ? ScalarType::Byte : ScalarType::Float);
  check_size(op, "values", values, 0, ids.numel());
  check_size(op, "values", values, 1, given_packed ? bytes : table.dim);
  const auto* id = static_cast<const int64_t*>(ids.data_ptr());
  for (int64_t i = 0; padding_id != nullptr && i < ids.numel(); ++i) {
    DYNEMB_CHECK(id[i] != *padding_id, "dynemb::", op, ": ids[", i, "] is ", id[i],
                 ", the padding id of table ", number, ", which has no row: leave it out");
  }
  data_ = values.data_ptr();
  if (table.format == Storage::kFloat32 && bytes == 8 * table.row_words) return;
  packed_.resize(static_cast<size_t>(ids.numel() * table.row_words));
  data_ = packed_.data();
  for (int64_t i = 0; i < ids.numel(); ++i) {
    int64_t* row = packed_.data() + i * table.row_words;
    const bool held =
        given_packed ? copy_live_row(table.format,
                                     static_cast<const uint8_t*>(values.data_ptr()) + i * bytes,
                                     table.dim, row)
                     : pack_live_row(table.format,
                                     static_cast<const float*>(values.data_ptr()) + i * table.dim,
                                     table.dim, row);
    DYNEMB_CHECK(held, "dynemb::", op, ": values[", i, "], the row of id ", id[i],
                 ", has NaN, infinity or a range that no scale of its format holds (int4: values "
                 "up to 65504): leave the id out, or make tables with rows of floats");
  }
}

Tensor outcome_counts(const LiveOutcome& outcome) {
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

}  // namespace dynemb::cpu
