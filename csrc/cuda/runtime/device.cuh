// What kernels share: errors, vector loads, groups of lanes.
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

// How a kernel reports: any of several concurrent reports may win; each is one 8-byte store.
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

// As count_by_key, for all threads of the block, which must all call it: one atomic operation where
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

// A power of two of neighbouring lanes that work on one row together, each on kWidth consecutive
// columns at a time. kMostLanes is 32, all of a warp, or 16: then the group is as large as `log2`
// says, so that one kernel serves all small rows. A kernel takes its group as an argument.
template <int kColumns, int kMostLanes>
struct LaneGroup {
  static_assert(kMostLanes == 16 || kMostLanes == 32, "groups of 32 lanes, or of at most 16");
  static constexpr int kWidth = kColumns;
  // odd rows, whose lanes have one column at a time, are taken in chunks as wide as others
  static constexpr int kSweeps = kWidth == 1 && kMostLanes == 32 ? 4 : 1;
  static constexpr int kValues = kWidth * kSweeps;  // of a lane, in a chunk of a row
  static constexpr int kMostColumns = kMostLanes * kValues;

  int log2;

  __host__ __device__ __forceinline__ int size_log2() const {
    if constexpr (kMostLanes == 32) {
      return 5;
    } else {
      return log2;
    }
  }
  __host__ __device__ __forceinline__ int size() const { return 1 << size_log2(); }
  // Columns that all lanes take at a time where they need all tensors of the row at once.
  __device__ __forceinline__ int64_t chunk() const { return size() * kValues; }

  // The number of the group in the grid, and the number of groups.
  __device__ __forceinline__ int64_t number() const { return thread_number() >> size_log2(); }
  __device__ __forceinline__ int64_t total() const { return thread_total() >> size_log2(); }

  __device__ __forceinline__ int lane() const {
    return static_cast<int>(threadIdx.x) & (size() - 1);
  }
  // The lane's first column of the chunk, or sweep of a chunk, that begins at column `first`.
  __device__ __forceinline__ int64_t column(int64_t first, int sweep = 0) const {
    return first + (sweep * size() + lane()) * kWidth;
  }
  __device__ __forceinline__ unsigned mask() const {
    if constexpr (kMostLanes == 32) {
      return 0xffffffffu;
    } else {
      const unsigned first = (threadIdx.x & 31u) & ~static_cast<unsigned>(size() - 1);
      return ((1u << size()) - 1u) << first;
    }
  }
  template <class T>
  __device__ __forceinline__ T broadcast(T value, int from) const {
    return __shfl_sync(mask(), value, from, size());
  }
  __device__ __forceinline__ bool any(bool flag) const { return __ballot_sync(mask(), flag) != 0; }
  // Sum over the lanes, in a fixed order, to all of them.
  __device__ __forceinline__ float sum(float value) const {
#pragma unroll
    for (int distance = size() / 2; distance > 0; distance /= 2) {
      value += __shfl_xor_sync(mask(), value, distance, size());
    }
    return value;
  }
  // The largest of all lanes, to all of them.
  __device__ __forceinline__ uint32_t largest(uint32_t value) const {
#pragma unroll
    for (int distance = size() / 2; distance > 0; distance /= 2) {
      const uint32_t other = __shfl_xor_sync(mask(), value, distance, size());
      value = other > value ? other : value;
    }
    return value;
  }
};

// kWidth consecutive floats: 16-byte accesses where rows allow it.
template <int kWidth>
struct Floats {
  float value[kWidth];
};
template <int kWidth>
__device__ __forceinline__ Floats<kWidth> load_floats(const float* from) {
  Floats<kWidth> result;
  if constexpr (kWidth == 4) {
    const float4 loaded = *reinterpret_cast<const float4*>(from);
    result.value[0] = loaded.x;
    result.value[1] = loaded.y;
    result.value[2] = loaded.z;
    result.value[3] = loaded.w;
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) result.value[i] = from[i];
  }
  return result;
}
template <int kWidth>
__device__ __forceinline__ void store_floats(float* to, const Floats<kWidth>& floats) {
  if constexpr (kWidth == 4) {
    *reinterpret_cast<float4*>(to) =
        make_float4(floats.value[0], floats.value[1], floats.value[2], floats.value[3]);
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) to[i] = floats.value[i];
  }
}
template <int kWidth>
__device__ __forceinline__ Floats<kWidth> zero_floats() {
  Floats<kWidth> result;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) result.value[i] = 0.0f;
  return result;
}

// A lane's columns of kSweeps sweeps from `column` on; 0 beyond `dim` columns.
template <int kSweeps, class Group>
__device__ __forceinline__ Floats<Group::kWidth * kSweeps> load_sweeps(const Group& group,
                                                                       const float* row,
                                                                       int64_t column,
                                                                       int64_t dim) {
  constexpr int kWidth = Group::kWidth;
  Floats<kWidth * kSweeps> result;
#pragma unroll
  for (int sweep = 0; sweep < kSweeps; ++sweep) {
    const int64_t at = column + sweep * group.size() * kWidth;
    const Floats<kWidth> part = at < dim ? load_floats<kWidth>(row + at) : zero_floats<kWidth>();
#pragma unroll
    for (int i = 0; i < kWidth; ++i) result.value[sweep * kWidth + i] = part.value[i];
  }
  return result;
}

}  // namespace dynemb::cuda
