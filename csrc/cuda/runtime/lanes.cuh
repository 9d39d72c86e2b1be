// Groups of lanes that work on rows together: columns, vector loads, sums, and rows that follow one
// another.
#pragma once

#include "cuda/runtime/device.cuh"

namespace dynemb::cuda {

// A power of two of adjacent lanes that work on one row together, each on kWidth consecutive
// columns at a time. kMostLanes is 32, a whole warp, or 16: then `log2` gives the size of the
// group, so that one kernel serves all small rows. A kernel takes its group as an argument.
template <int kColumns, int kMostLanes>
struct LaneGroup {
  static_assert(kMostLanes == 16 || kMostLanes == 32, "groups of 32 lanes, or of at most 16");
  static constexpr int kWidth = kColumns;
  // odd rows, with one column per lane, are taken in chunks as wide as others
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
  // Columns that all lanes take at a time, if they need all tensors of the row at once.
  __device__ __forceinline__ int64_t stride() const { return size() * kWidth; }
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
  // Sum over the lanes, in a fixed order; all lanes get it.
  __device__ __forceinline__ float sum(float value) const {
#pragma unroll
    for (int distance = size() / 2; distance > 0; distance /= 2) {
      value += __shfl_xor_sync(mask(), value, distance, size());
    }
    return value;
  }
  // Largest value of all lanes; all lanes get it.
  __device__ __forceinline__ uint32_t largest(uint32_t value) const {
#pragma unroll
    for (int distance = size() / 2; distance > 0; distance /= 2) {
      const uint32_t other = __shfl_xor_sync(mask(), value, distance, size());
      value = other > value ? other : value;
    }
    return value;
  }
};

// kWidth consecutive floats: 16-byte accesses if rows allow it.
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

// Adds factor * floats, or their products one after another.
template <int kWidth>
__device__ __forceinline__ void add_scaled(Floats<kWidth>* sum, float factor,
                                           const Floats<kWidth>& floats) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) sum->value[i] += factor * floats.value[i];
}
template <int kWidth>
__device__ __forceinline__ void add_products(float* sum, const Floats<kWidth>& a,
                                             const Floats<kWidth>& b) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) *sum += a.value[i] * b.value[i];
}

// -- rows that follow one another -----------------------------------------------------------------

constexpr int kRowsInFlight = 4;  // loads of rows that a lane starts before it uses the first

// Streams the rows that the first `count` lanes of a group have each found, in order. All lanes
// call load(lane, wanted), which broadcasts that lane's data and starts the load if it is wanted,
// then use(row, lane) with the result of load.
template <int kInFlight = kRowsInFlight, class Load, class Use>
__device__ __forceinline__ void stream_rows(int count, const Load& load, const Use& use) {
  for (int first = 0; first < count; first += kInFlight) {
    decltype(load(0, true)) rows[kInFlight];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      const bool wanted = first + u < count;
      rows[u] = load(wanted ? first + u : count - 1, wanted);
    }
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      if (first + u < count) use(rows[u], first + u);
    }
  }
}

// Streams the rows of items [begin, end), of any number: each lane finds one by look(item), where
// item may be beyond the end, then load(seen, lane, wanted) and use(row, item) are as above.
template <class Group, class Look, class Load, class Use>
__device__ __forceinline__ void stream_items(const Group& group, int64_t begin, int64_t end,
                                             const Look& look, const Load& load, const Use& use) {
  for (int64_t i = begin; i < end; i += group.size()) {
    const auto seen = look(i + group.lane());
    stream_rows(
        static_cast<int>(min(static_cast<int64_t>(group.size()), end - i)),
        [&](int lane, bool wanted) { return load(seen, lane, wanted); },
        [&](const auto& row, int lane) { use(row, i + lane); });
  }
}

}  // namespace dynemb::cuda
