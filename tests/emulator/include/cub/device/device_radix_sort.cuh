#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <type_traits>
#include <vector>

#include "emulator/cub_storage.h"

namespace cub {

struct DeviceRadixSort {
  template <class Key, class Value, class Count>
  static cudaError_t SortPairs(void* storage, size_t& storage_bytes, const Key* keys_in,
                               Key* keys_out, const Value* values_in, Value* values_out,
                               Count count, int begin_bit = 0, int end_bit = sizeof(Key) * 8,
                               cudaStream_t stream = nullptr) {
    const auto n = static_cast<size_t>(count);
    const size_t needed = 256 + n * (sizeof(Key) + sizeof(Value));
    cudaError_t status;
    if (emulator::only_asks(storage, storage_bytes, needed, &status) || status != cudaSuccess) {
      return status;
    }
    if (overlap(keys_in, keys_out, n) || overlap(values_in, values_out, n)) {
      return cudaErrorInvalidValue;
    }
    return emulator::run(stream, [=] {
      emulator::overwrite(storage, needed);
      const std::vector<size_t> order = sorted(keys_in, n, begin_bit, end_bit);
      for (size_t i = 0; i < n; ++i) {
        keys_out[i] = keys_in[order[i]];
        values_out[i] = values_in[order[i]];
      }
    });
  }

  template <class Key, class Count>
  static cudaError_t SortKeys(void* storage, size_t& storage_bytes, const Key* keys_in,
                              Key* keys_out, Count count, int begin_bit = 0,
                              int end_bit = sizeof(Key) * 8, cudaStream_t stream = nullptr) {
    const auto n = static_cast<size_t>(count);
    const size_t needed = 256 + n * sizeof(Key);
    cudaError_t status;
    if (emulator::only_asks(storage, storage_bytes, needed, &status) || status != cudaSuccess) {
      return status;
    }
    if (overlap(keys_in, keys_out, n)) return cudaErrorInvalidValue;
    return emulator::run(stream, [=] {
      emulator::overwrite(storage, needed);
      const std::vector<size_t> order = sorted(keys_in, n, begin_bit, end_bit);
      for (size_t i = 0; i < n; ++i) keys_out[i] = keys_in[order[i]];
    });
  }

 private:
  template <class T>
  static bool overlap(const T* a, const T* b, size_t count) {
    return count > 0 && a < b + count && b < a + count;
  }

  // Which input comes at each place of the output.
  template <class Key>
  static std::vector<size_t> sorted(const Key* keys, size_t count, int begin_bit, int end_bit) {
    static_assert(std::is_integral_v<Key>, "the emulator sorts integers only");
    constexpr uint64_t kSign = std::is_signed_v<Key> ? uint64_t{1} << (sizeof(Key) * 8 - 1) : 0;
    const int bits = end_bit - begin_bit;
    const uint64_t mask = bits >= 64 ? ~uint64_t{0} : (uint64_t{1} << bits) - 1;
    std::vector<size_t> order(count);
    std::iota(order.begin(), order.end(), size_t{0});
    if (bits <= 0) return order;
    const auto digits = [&](size_t i) {
      const uint64_t word = static_cast<std::make_unsigned_t<Key>>(keys[i]) ^ kSign;
      return (word >> begin_bit) & mask;
    };
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t a, size_t b) { return digits(a) < digits(b); });
    return order;
  }
};

}  // namespace cub
