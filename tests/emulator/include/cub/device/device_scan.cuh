#pragma once

#include <iterator>

#include "emulator/cub_storage.h"

namespace cub {

// Sums have the type of the input's elements, as in cub: 32-bit counts overflow.
struct DeviceScan {
  template <class In, class Out, class Count>
  static cudaError_t ExclusiveSum(void* storage, size_t& storage_bytes, In in, Out out, Count count,
                                  cudaStream_t = nullptr) {
    return scan<true>(storage, storage_bytes, in, out, count);
  }
  template <class In, class Out, class Count>
  static cudaError_t InclusiveSum(void* storage, size_t& storage_bytes, In in, Out out, Count count,
                                  cudaStream_t = nullptr) {
    return scan<false>(storage, storage_bytes, in, out, count);
  }

 private:
  template <bool kExclusive, class In, class Out, class Count>
  static cudaError_t scan(void* storage, size_t& storage_bytes, In in, Out out, Count count) {
    cudaError_t status;
    if (emulator::only_asks(storage, storage_bytes, 256 + static_cast<size_t>(count) / 64,
                            &status) ||
        status != cudaSuccess) {
      return status;
    }
    typename std::iterator_traits<In>::value_type sum{};
    for (Count i = 0; i < count; ++i) {
      const auto before = sum;
      sum = sum + in[i];  // read before the write: in and out may be the same
      out[i] = kExclusive ? before : sum;
    }
    return cudaSuccess;
  }
};

}  // namespace cub
