// quantize_rows and dequantize_rows: conversion of rows of read-only tables.
#include "arguments/quantized.h"
#include "core/rows/quantized.h"
#include "cuda/rows/storage.cuh"
#include "cuda/runtime/launch.h"

namespace dynemb::cuda {
namespace {

__device__ uint32_t row_code(Storage storage, float value, const RowScale& scale) {
  if (!is_finite(scale.scale)) return 0;
  if (storage == Storage::kInt8) return int8_code(value, scale);
  return storage == Storage::kInt4 ? int4_code(value, scale) : float8_code(value, scale);
}

using RowGroup = LaneGroup<1, 32>;  // a warp for a row, a lane for a column or for a byte of codes

__device__ __forceinline__ float value_at(const QuantizedRows& given, const char* row,
                                          int64_t column) {
  return to_floats<1>(given.floats, load_stored<1>(given.floats, row, column)).value[0];
}

// A row is read twice, the second time mostly from L2; its codes are written in order.
__global__ void quantize_each_row(RowGroup group, QuantizedRows given, uint8_t* packed) {
  const int64_t number = group.number();
  if (number >= given.rows) return;
  const int64_t value_bytes = given.floats == Storage::kFloat32 ? 4 : 2;
  const char* from = given.from + number * given.dim * value_bytes;
  RowRange range;
  for (int64_t column = group.lane(); column < given.dim; column += group.size()) {
    const int32_t order = float_order(value_at(given, from, column));
    range.least = min(range.least, order);
    range.most = max(range.most, order);
  }
  constexpr uint32_t kSign = 0x80000000u;  // turns the order of words into that of integers
  const uint32_t most = group.largest(static_cast<uint32_t>(range.most) ^ kSign);
  const uint32_t least = group.largest(~(static_cast<uint32_t>(range.least) ^ kSign));
  range = {static_cast<int32_t>(~least ^ kSign), static_cast<int32_t>(most ^ kSign)};
  const RowScale scale = row_scale(given.codes, range);
  uint8_t* to = packed + number * given.row_bytes;
  const int64_t bytes = code_bytes(given.codes, given.dim);
  if (group.lane() == 0) store_row_scale(given.codes, scale, to + bytes);
  for (int64_t byte = group.lane(); byte < bytes; byte += group.size()) {
    if (given.codes == Storage::kInt4) {
      const uint32_t low = row_code(given.codes, value_at(given, from, 2 * byte), scale);
      const uint32_t high = row_code(given.codes, value_at(given, from, 2 * byte + 1), scale);
      to[byte] = static_cast<uint8_t>(low | high << 4);
    } else {
      to[byte] = static_cast<uint8_t>(row_code(given.codes, value_at(given, from, byte), scale));
    }
  }
}

// A row is read once, and written in order.
__global__ void dequantize_each_row(RowGroup group, QuantizedRows given, float* rows) {
  const int64_t number = group.number();
  if (number >= given.rows) return;
  const auto* from = reinterpret_cast<const uint8_t*>(given.from) + number * given.row_bytes;
  const RowScale scale = load_row_scale(given.codes, from + code_bytes(given.codes, given.dim));
  for (int64_t column = group.lane(); column < given.dim; column += group.size()) {
    rows[number * given.dim + column] = quantized_value(given.codes, from, column, scale);
  }
}

Tensor quantize_rows(Tensor rows, int64_t format) {
  const Call call("quantize_rows", "rows", rows);
  const QuantizedRows given = rows_to_quantize(call, rows, format);
  Tensor packed = call.empty({given.rows, given.row_bytes}, ScalarType::Byte);
  const RowGroup group{5};
  if (given.rows > 0) {
    call.launch(quantize_each_row, given.rows * group.size(), 0, group, given,
                static_cast<uint8_t*>(packed.data_ptr()));
  }
  return packed;
}

Tensor dequantize_rows(Tensor packed, int64_t format, int64_t dim) {
  const Call call("dequantize_rows", "packed", packed);
  const QuantizedRows given = rows_to_dequantize(call, packed, format, dim);
  Tensor rows = call.empty({given.rows, given.dim}, ScalarType::Float);
  const RowGroup group{5};
  if (given.rows > 0) {
    call.launch(dequantize_each_row, given.rows * group.size(), 0, group, given,
                static_cast<float*>(rows.data_ptr()));
  }
  return rows;
}

}  // namespace
}  // namespace dynemb::cuda

DYNEMB_IMPLEMENT_OPS(m) {
  m.impl("quantize_rows", TORCH_BOX(&dynemb::cuda::quantize_rows));
  m.impl("dequantize_rows", TORCH_BOX(&dynemb::cuda::dequantize_rows));
}
