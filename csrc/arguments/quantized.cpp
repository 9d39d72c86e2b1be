#include "arguments/quantized.h"

#include "arguments/rows.h"

namespace dynemb {
namespace {

Storage checked_format(const char* op, int64_t format) {
  DYNEMB_CHECK(format >= kRowsOfInt8 && format <= kRowsOfFloat8, "dynemb::", op, ": format is ",
               format, ", expected 1 (int8), 2 (int4) or 3 (fp8)");
  return storage_of_format(format);
}

void check_columns(const char* op, const char* name, int64_t dim, Storage codes) {
  DYNEMB_CHECK(dim >= 1, "dynemb::", op, ": ", name, " is ", dim, ", expected at least 1");
  DYNEMB_CHECK(codes != Storage::kInt4 || dim % 2 == 0, "dynemb::", op, ": ", name, " is ", dim,
               ", but rows of int4 have an even number of columns: take int8 or fp8");
}

void check_is_matrix(const char* op, const char* name, const Tensor& tensor) {
  DYNEMB_CHECK(tensor.dim() == 2, "dynemb::", op, ": ", name, " has ", tensor.dim(),
               " dimensions, expected 2");
}

}  // namespace

QuantizedRows rows_to_quantize(const CallContext& call, const Tensor& rows, int64_t format) {
  const Storage codes = checked_format(call.op, format);
  const Storage floats = storage_of(call, "rows", rows);
  check_is_matrix(call.op, "rows", rows);
  const int64_t dim = rows.size(1);
  check_columns(call.op, "rows.size(1)", dim, codes);
  return {static_cast<const char*>(rows.data_ptr()),  rows.size(0), dim, floats, codes,
          code_bytes(codes, dim) + scale_bytes(codes)};
}

QuantizedRows rows_to_dequantize(const CallContext& call, const Tensor& packed, int64_t format,
                                 int64_t dim) {
  const Storage codes = checked_format(call.op, format);
  check_tensor(call, "packed", packed, ScalarType::Byte);
  check_is_matrix(call.op, "packed", packed);
  check_columns(call.op, "dim", dim, codes);
  result_bytes(call.op, "dim", dim, {packed.size(0), dim}, 4);
  const int64_t row_bytes = code_bytes(codes, dim) + scale_bytes(codes);
  DYNEMB_CHECK(packed.size(1) == row_bytes, "dynemb::", call.op, ": packed.size(1) is ",
               packed.size(1), ", expected ", row_bytes, ", the bytes of a row of dim ", dim);
  return {static_cast<const char*>(packed.data_ptr()),
          packed.size(0),
          dim,
          Storage::kFloat32,
          codes,
          row_bytes};
}

}  // namespace dynemb
