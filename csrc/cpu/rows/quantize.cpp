// quantize_rows and dequantize_rows: conversion of rows of read-only tables.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <vector>

#include "arguments/quantized.h"
#include "cpu/rows/quantized_rows.h"
#include "cpu/rows/storage.h"
#include "cpu/runtime/parallel.h"
#include "cpu/runtime/results.h"

namespace dynemb::cpu {
namespace {

constexpr int64_t kRowsOfUnit = 256;

struct QuantizeJob {
  const QuantizedRows* given;
  char* to;
  float* scratch;  // a row
  int64_t begin;   // rows
  int64_t end;
};

DYNEMB_INLINE void quantize_unit_body(const QuantizeJob& job) {
  const QuantizedRows& given = *job.given;
  const int64_t bytes = given.dim * (given.floats == Storage::kFloat32 ? 4 : 2);
  for (int64_t row = job.begin; row < job.end; ++row) {
    const char* from = given.from + row * bytes;
    const auto* values = reinterpret_cast<const float*>(from);
    if (given.floats != Storage::kFloat32) {
      load_row(given.floats, from, given.dim, job.scratch);
      values = job.scratch;
    }
    store_quantized_row(given.codes, values, given.dim,
                        reinterpret_cast<uint8_t*>(job.to + row * given.row_bytes));
  }
}
DYNEMB_SIMD_VARIANTS(quantize_unit, (const QuantizeJob& job), (job))

DYNEMB_INLINE void dequantize_unit_body(const QuantizeJob& job) {
  const QuantizedRows& given = *job.given;
  auto* to = reinterpret_cast<float*>(job.to);
  for (int64_t row = job.begin; row < job.end; ++row) {
    load_quantized_row(given.codes, given.from + row * given.row_bytes, given.dim,
                       to + row * given.dim);
  }
}
DYNEMB_SIMD_VARIANTS(dequantize_unit, (const QuantizeJob& job), (job))

template <class F>
void for_each_unit(const QuantizedRows& given, Tensor* result, const F& run) {
  const int64_t units = (given.rows + kRowsOfUnit - 1) / kRowsOfUnit;
  auto* to = static_cast<char*>(result->data_ptr());
  parallel_units(units, given.rows, [&](int64_t begin, int64_t end) {
    std::vector<float> scratch(static_cast<size_t>(given.dim));
    const QuantizeJob job{&given, to, scratch.data(), begin * kRowsOfUnit,
                          std::min(end * kRowsOfUnit, given.rows)};
    run(job);
  });
}

Tensor quantize_rows(Tensor rows, int64_t format) {
  const QuantizedRows given = rows_to_quantize("quantize_rows", rows, format);
  Tensor packed = empty_cpu({given.rows, given.row_bytes}, ScalarType::Byte);
  for_each_unit(given, &packed, [](const QuantizeJob& job) { quantize_unit(job); });
  return packed;
}

Tensor dequantize_rows(Tensor packed, int64_t format, int64_t dim) {
  const QuantizedRows given = rows_to_dequantize("dequantize_rows", packed, format, dim);
  Tensor rows = empty_cpu({given.rows, given.dim}, ScalarType::Float);
  for_each_unit(given, &rows, [](const QuantizeJob& job) { dequantize_unit(job); });
  return rows;
}

}  // namespace
}  // namespace dynemb::cpu

STABLE_TORCH_LIBRARY_IMPL(dynemb, CPU, m) {
  m.impl("quantize_rows", TORCH_BOX(&dynemb::cpu::quantize_rows));
  m.impl("dequantize_rows", TORCH_BOX(&dynemb::cpu::dequantize_rows));
}
