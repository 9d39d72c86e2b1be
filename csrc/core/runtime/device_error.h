// Errors of kernels: one 64-bit word in host memory that the device writes and the host reads
// without waiting. The next op, or optimizer.step(), raises.
#pragma once

#include "core/host_device.h"

namespace dynemb {

using ErrorWord = unsigned long long;

enum DeviceError : int {
  kErrorNone = 0,
  kErrorOffsetsStart = 1,     // value: the first offset
  kErrorOffsetsDecrease = 2,  // value: position of an offset that is less than the preceding one
  kErrorOffsetsEnd = 3,       // value: the last offset
  kErrorHandle = 4,           // value: the row
  kErrorBuckets = 5,          // value: table
  kErrorRows = 6,             // value: slab
  kErrorMemory = 7,           // value: table or slab with unmapped memory
  kErrorUpdated = 8,          // value: update count of the forward
  kErrorEntry = 9,            // value: entry
  kErrorCount = 10,           // value: slab
  kErrorTableUpdated = 11,    // value: entry
  kErrorFeatureDim = 12,      // value: feature
  kErrorFull = 13,            // value: table
  kErrorNonFinite = 14,       // value: table
  kErrorPending = 15,         // value: slab
  kErrorWeightsUpdated = 16,  // value: update count of the forward
  kErrorListStart = 17,       // value: feature with offsets that do not begin with 0
  kErrorListDecrease = 18,    // value: feature with decreasing offsets
  kErrorListEnd = 19,         // value: feature with offsets that do not end with the number of its
                              // values
  kErrorEmptyTable = 20,      // value: table
  kErrorPosition = 30,        // value: the position
  kErrorRowLength = 31,       // value: feature with a row longer than its dense dimension
};

// code : 6 | op : 10 | value : 48 (clipped)
DYNEMB_HD ErrorWord encode_error(int code, int op, int64_t value) {
  const ErrorWord limit = (ErrorWord{1} << 48) - 1;
  const ErrorWord clipped = static_cast<ErrorWord>(value) & limit;
  return (static_cast<ErrorWord>(code) << 58) | (static_cast<ErrorWord>(op & 1023) << 48) | clipped;
}
DYNEMB_HD int error_code(ErrorWord word) { return static_cast<int>(word >> 58); }
DYNEMB_HD int error_op(ErrorWord word) { return static_cast<int>((word >> 48) & 1023); }
DYNEMB_HD int64_t error_value(ErrorWord word) {  // sign-extended
  return static_cast<int64_t>(word << 16) >> 16;
}

}  // namespace dynemb
