#pragma once

#include <iterator>

#include "emulator/cub_storage.h"

namespace cub {

// Sums have the type of the input's elements, as in cub: 32-bit counts overflow.
struct DeviceScan {
  template <class In, class Out, class Count>
  static cudaError_t ExclusiveSum(void* storage, size_t& storage_bytes, In in, Out out, Count count,
                                  cudaStream_t stream = nullptr) {
    return scan<true>(storage, storage_bytes, in, out, count, stream);
  }
  template <class In, class Out, class Count>
  static cudaError_t InclusiveSum(void* storage, size_t& storage_bytes, In in, Out out, Count count,
                                  cudaStream_t stream = nullptr) {
    return scan<false>(storage, storage_bytes, in, out, count, stream);
  }

 private:
  template <bool kExclusive, class In, class Out, class Count>
  static cudaError_t scan(void* storage, size_t& storage_bytes, In in, Out out, Count count,
                          cudaStream_t stream) {
    const size_t needed = 256 + static_cast<size_t>(count) / 64;
    cudaError_t status;
    if (emulator::only_asks(storage, storage_bytes, needed, &status) || status != cudaSuccess) {
      return status;
    }
    return emulator::run(stream, [=] {
      emulator::overwrite(storage, needed);
      typename std::iterator_traits<In>::value_type sum{};
      Out to = out;
      for (Count i = 0; i < count; ++i) {
        const auto before = sum;
        sum = sum + in[i];  // read before the write: in and out may be the same
        to[i] = kExclusive ? before : sum;
      }
    });
  }
};

}  // namespace cub
