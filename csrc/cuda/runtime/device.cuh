// Shared parts of kernels: numbers of threads, errors, counters.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/runtime/device_error.h"

namespace dynemb::cuda {

// The index of the thread in the grid, and the number of threads.
__device__ __forceinline__ int64_t thread_number() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}
__device__ __forceinline__ int64_t thread_total() {
  return static_cast<int64_t>(gridDim.x) * blockDim.x;
}

// Accesses that race with others of their kernel: one access each of the L2 cache, where all
// threads of a GPU meet. A comment at each says why an older value does no harm, or that all
// threads that write the word write the same. A race checker (tests/emulator) takes them for
// relaxed atomics, and reports all other races.
template <class T>
__device__ __forceinline__ T load_racing(const T* from) {
  return __ldcg(from);
}
template <class T>
__device__ __forceinline__ void store_racing(T* to, T value) {
  __stcg(to, value);
}

// Asks for memory that will be read or written soon: its lines come into the L2 cache meanwhile.
__device__ __forceinline__ void prefetch([[maybe_unused]] const void* from,
                                         [[maybe_unused]] int64_t bytes) {
#if !defined(DYNEMB_EMULATED)
  constexpr int64_t kLine = 128;
  const auto* first = static_cast<const char*>(from);
#pragma unroll 1
  for (int64_t at = 0; at < bytes; at += kLine) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(first + at));
  }
#endif
}

// Error reports of a kernel: any of several concurrent reports may win; each is one 8-byte store.
struct ErrorSink {
  ErrorWord* word;
  int32_t op;

  __device__ __forceinline__ void report(int code, int64_t value) const {
    *reinterpret_cast<volatile ErrorWord*>(word) = encode_error(code, op, value);
  }
};

// Adds the number of flagged lanes with each key to counters[key]. All lanes of the warp must call
// it. Lanes of one key, the usual case, make one atomic operation.
__device__ __forceinline__ void count_by_key(bool flag, int64_t key, int64_t* counters) {
  const unsigned flagged = __ballot_sync(0xffffffffu, flag);
  if (flagged == 0) return;
  const int leader = __ffs(static_cast<int>(flagged)) - 1;
  const int64_t first_key = __shfl_sync(0xffffffffu, static_cast<long long>(key), leader);
  const bool same = __all_sync(0xffffffffu, !flag || key == first_key) != 0;
  auto* counter = reinterpret_cast<unsigned long long*>(counters + key);
  if (same) {
    if ((static_cast<int>(threadIdx.x) & 31) == leader) {
      atomicAdd(counter, static_cast<unsigned long long>(__popc(flagged)));
    }
  } else if (flag) {
    atomicAdd(counter, 1ULL);
  }
}

// As count_by_key, for all threads of the block, which must all call it: one atomic operation if
// they have one key.
__device__ __forceinline__ void count_in_block(bool flag, int64_t key, int64_t* counters) {
  __shared__ int64_t first_key;
  const int count = __syncthreads_count(flag);
  if (count == 0) return;
  if (threadIdx.x == 0) first_key = key;
  __syncthreads();
  if (__syncthreads_and(!flag || key == first_key) == 0) {
    count_by_key(flag, key, counters);
  } else if (threadIdx.x == 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(counters + key),
              static_cast<unsigned long long>(count));
  }
}

}  // namespace dynemb::cuda
