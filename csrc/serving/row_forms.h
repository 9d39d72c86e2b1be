// Rows of a log with rows="int8", which are uint8: codes, then scale and bias.

#pragma once

#include <ATen/Tensor.h>

#include "core/rows/quantized.h"
#include "serving/ops.h"

namespace dynemb::serving::detail {

inline bool is_quantized_rows(const at::Tensor& rows) { return rows.scalar_type() == at::kByte; }

// The rows as floats.
inline at::Tensor as_floats(const at::Tensor& rows, int64_t columns) {
  if (!is_quantized_rows(rows)) return rows;
  return call("dynemb::dequantize_rows", rows.contiguous(), int64_t{kRowsOfInt8}, columns)
      .toTensor();
}

}  // namespace dynemb::serving::detail
