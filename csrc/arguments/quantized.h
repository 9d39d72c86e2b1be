// Checked arguments of ops on quantized rows.
#pragma once

#include <cstdint>

#include "arguments/tensors.h"
#include "core/rows/quantized.h"

namespace dynemb {

// Rows of floats and rows of codes.
struct QuantizedRows {
  const char* from;
  int64_t rows;
  int64_t dim;
  Storage floats;  // storage of the rows of floats
  Storage codes;
  int64_t row_bytes;  // of a row of codes
};

// Rows [rows, dim] to quantize.
QuantizedRows rows_to_quantize(const CallContext& call, const Tensor& rows, int64_t format);
// Rows of codes, uint8 [rows, bytes], to turn into float32 [rows, dim].
QuantizedRows rows_to_dequantize(const CallContext& call, const Tensor& packed, int64_t format,
                                 int64_t dim);

}  // namespace dynemb
