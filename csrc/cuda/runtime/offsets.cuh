// Unchecked offsets [parts + 1] of a call, which divide `count` values.
#pragma once

#include "cuda/runtime/device.cuh"

namespace dynemb::cuda {

// An offset, clamped to the range.
__device__ __forceinline__ int64_t clipped_offset(int64_t offset, int64_t count) {
  return offset < 0 ? 0 : (offset > count ? count : offset);
}

// Binary search: the last i of [0, count) with holds(i), which stays false from the first false on;
// 0 if there is none.
template <class Condition>
__device__ __forceinline__ int64_t last_where(int64_t count, const Condition& holds) {
  int64_t low = 0;
  int64_t high = count - 1;
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (holds(middle)) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// The last of the `parts` that begins at or before `position`.
__device__ __forceinline__ int64_t part_of(const int64_t* begin, int64_t parts, int64_t position) {
  return last_where(parts, [&](int64_t part) { return begin[part] <= position; });
}

// Errors in offsets, the same as on the CPU.
enum class OffsetFault { kNone, kStart, kEnd, kDecrease };

// The fault that thread i of [0, parts), at least one, checks for: at offset i + 1, or at the first
// and the last.
__device__ __forceinline__ OffsetFault offset_fault(const int64_t* offsets, int64_t parts,
                                                    int64_t count, int64_t i) {
  if (i == 0 && offsets[0] != 0) return OffsetFault::kStart;
  if (i == 0 && offsets[parts] != count) return OffsetFault::kEnd;
  return i < parts && offsets[i + 1] < offsets[i] ? OffsetFault::kDecrease : OffsetFault::kNone;
}

// Reports the fault of thread i; false if there is one.
__device__ __forceinline__ bool check_offset(const int64_t* offsets, int64_t parts, int64_t count,
                                             int64_t i, const ErrorSink& errors) {
  switch (offset_fault(offsets, parts, count, i)) {
    case OffsetFault::kStart:
      errors.report(kErrorOffsetsStart, offsets[0]);
      return false;
    case OffsetFault::kEnd:
      errors.report(kErrorOffsetsEnd, offsets[parts]);
      return false;
    case OffsetFault::kDecrease:
      errors.report(kErrorOffsetsDecrease, i + 1);
      return false;
    default:
      return true;
  }
}

// The same for the offsets of one of many lists.
__device__ __forceinline__ void check_list_offset(const int64_t* offsets, int64_t parts,
                                                  int64_t count, int64_t i, int64_t list,
                                                  const ErrorSink& errors) {
  const OffsetFault fault = offset_fault(offsets, parts, count, i);
  if (fault == OffsetFault::kStart) errors.report(kErrorListStart, list);
  if (fault == OffsetFault::kEnd) errors.report(kErrorListEnd, list);
  if (fault == OffsetFault::kDecrease) errors.report(kErrorListDecrease, list);
}

}  // namespace dynemb::cuda
