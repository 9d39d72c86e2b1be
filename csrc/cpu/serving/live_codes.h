// Conversion of floats to rows of live tables.
#pragma once

#include <cstring>

#include "core/serving/live_row.h"
#include "cpu/rows/quantized_rows.h"
#include "cpu/rows/storage.h"
#include "cpu/runtime/scratch.h"
#include "cpu/serving/args.h"
#include "cpu/serving/live_writer.h"

namespace dynemb::cpu {

// Fills a row of live_row_words(format, dim) words; false if the format cannot hold the values.
inline bool pack_live_row(Storage format, const float* values, int64_t dim, int64_t* row) {
  std::memset(row, 0, 8 * static_cast<size_t>(live_row_words(format, dim)));
  char* stored = reinterpret_cast<char*>(row);
  if (!is_quantized(format)) {
    store_row(format, kToNearest, values, dim, stored);
    return true;
  }
  auto* codes = reinterpret_cast<uint8_t*>(stored);
  store_quantized_row(format, values, dim, codes);
  return is_finite(load_row_scale(format, codes + code_bytes(format, dim)).scale);
}

// The same for values that are quantized in this format.
inline bool copy_live_row(Storage format, const uint8_t* values, int64_t dim, int64_t* row) {
  std::memset(row, 0, 8 * static_cast<size_t>(live_row_words(format, dim)));
  std::memcpy(row, values, static_cast<size_t>(live_value_bytes(format, dim)));
  const RowScale scale = load_row_scale(format, values + code_bytes(format, dim));
  return is_finite(scale.scale) && is_finite(scale.bias);
}

// The rows of an update, checked, as a live table stores them. `values`: float32 [n, dim], or uint8
// [n, bytes] of rows that are quantized in its format. Raises for a row that the format cannot
// hold, and for the padding id, nullptr: none.
class PackedRows {
 public:
  PackedRows(const char* op, const LiveTable& table, int64_t number, const Tensor& ids,
             const Tensor& values, const int64_t* padding_id);
  const void* data() const { return data_; }

 private:
  Scratch<int64_t> packed_;
  const void* data_;
};

// Result of an op that updates: inserted, updated, erased, rows wanted, rows free.
Tensor outcome_counts(const LiveOutcome& outcome);

}  // namespace dynemb::cpu
