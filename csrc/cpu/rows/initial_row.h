// Initial values of a row, vectorised over its columns, as floats that the row can store.
#pragma once

#include <algorithm>

#include "core/rows/initializer.h"
#include "cpu/rows/args.h"
#include "cpu/rows/normal_values.h"
#include "cpu/rows/quantized_rows.h"
#include "cpu/rows/random_words.h"
#include "cpu/rows/storage.h"
#include "cpu/runtime/prefetch.h"
#include "cpu/runtime/simd.h"

namespace dynemb::cpu {

// Columns [begin, end) of one record into row; `words` holds those from column `first` on.
DYNEMB_INLINE void init_columns(const double* record, const double* init_data,
                                const uint32_t* words, int64_t first, int64_t begin, int64_t end,
                                float* row) {
  const InitParameters p = init_parameters(record);
  switch (static_cast<int>(record[kInitKindColumn])) {
    case kInitUniform:
      for (int64_t c = begin; c < end; ++c) row[c] = uniform_value(words[c - first], p);
      break;
    case kInitNormal:
      normal_values(p, words + (begin - first), end - begin, row + begin);
      break;
    case kInitTruncatedNormal:
      truncated_normal_values(p, words + (begin - first), end - begin, row + begin);
      break;
    case kInitVector: {
      const double* values = init_data + static_cast<int64_t>(record[kInitParameters]);
      const int64_t offset = static_cast<int64_t>(record[kInitFirstColumn]);
      for (int64_t c = begin; c < end; ++c) row[c] = static_cast<float>(values[c - offset]);
      break;
    }
    default:
      for (int64_t c = begin; c < end; ++c) row[c] = p.p0;
  }
}

DYNEMB_INLINE void write_initial_row(const TableRows& table, int64_t records_begin, int64_t records,
                                     int64_t id, float* row) {
  const double* record = table.init_data + records_begin;
  bool random = false;
  for (int64_t r = 0; r < records; ++r) {
    const int kind = static_cast<int>(record[r * kInitRecordColumns + kInitKindColumn]);
    random |= kind != kInitConstant && kind != kInitVector;
  }
  uint32_t words[kInitChunk + kWidestVector];  // those after a chunk are read and ignored
  for (int64_t first = 0; first < table.dim; first += kInitChunk) {
    const int64_t last = std::min(first + kInitChunk, table.dim);
    if (random) random_words(table.seed, id, table.first_column + first, last - first, words);
    for (int64_t r = 0; r < records; ++r) {
      const double* columns = record + r * kInitRecordColumns;
      const int64_t begin = std::max(first, static_cast<int64_t>(columns[kInitFirstColumn]));
      const int64_t end = std::min(last, static_cast<int64_t>(columns[kInitEndColumn]));
      if (begin < end) init_columns(columns, table.init_data, words, first, begin, end, row);
    }
  }
  round_row(table.storage, row, table.dim);
}

// Values of an id in a lookup: the row itself, or a copy of it or an initial or default value in
// `scratch` (dim floats). nullptr: zeros (padding, or a stale handle).
template <class Level = BaseLevel>
DYNEMB_INLINE const float* resolve_row(const TableRows& table, int64_t handle, int64_t id,
                                       float* scratch) {
  if (handle >= 0) {
    const int64_t row = handle_row(handle);
    const RowStatus status = row_status(handle, table.generations[row]);
    if (status == RowStatus::kLive) {
      if (table.storage == Storage::kFloat32) return reinterpret_cast<float*>(table.row(row));
      if (is_quantized(table.storage)) {
        load_quantized_row(table.storage, table.row(row), table.dim, scratch);
      } else {
        load_row<Level>(table.storage, table.row(row), table.dim, scratch);
      }
      return scratch;
    }
    if (status == RowStatus::kStale) return nullptr;
    write_initial_row(table, table.init_begin, table.init_count, id, scratch);
    return scratch;
  }
  if (handle == kPaddingHandle) return nullptr;
  if (handle == kRefusedHandle) {
    write_initial_row(table, table.refused_begin, table.refused_count, id, scratch);
  } else {
    write_initial_row(table, table.default_begin, table.default_count, id, scratch);
  }
  return scratch;
}

// The same in the format of rows of 16 bits: initial values are rounded to it.
template <class Level>
DYNEMB_INLINE const uint16_t* resolve_halves(const TableRows& table, int64_t handle, int64_t id,
                                             float* scratch, uint16_t* halves) {
  if (handle >= 0) {
    const int64_t row = handle_row(handle);
    if (row_status(handle, table.generations[row]) == RowStatus::kLive) {
      return reinterpret_cast<const uint16_t*>(table.row(row));
    }
  }
  const float* values = resolve_row<Level>(table, handle, id, scratch);
  if (values == nullptr) return nullptr;
  store_row<Level>(table.storage, kToNearest, values, table.dim, reinterpret_cast<char*>(halves));
  return halves;
}

// Starts loading what resolve_row reads.
DYNEMB_INLINE void prefetch_row(const TableRows& table, int64_t handle) {
  if (handle < 0) return;
  const int64_t row = handle_row(handle);
  prefetch_line_of(table.generations + row);
  prefetch_row_bytes(table.row(row), table.row_bytes);
}

}  // namespace dynemb::cpu
