// Loads and stores of rows of weights and state as float32, by a group of lanes
// (core/rows/storage.h). The storage of a tensor is known at run time only, and the same for all
// lanes: a kernel for every combination would be too many.
#pragma once

#include "core/rows/storage.h"
#include "cuda/runtime/lanes.cuh"

namespace dynemb::cuda {

// kWidth stored values: several loads can be in flight before the first is converted.
template <int kWidth>
struct Stored {
  uint32_t word[kWidth];
};
template <int kWidth>
__device__ __forceinline__ Stored<kWidth> load_stored(Storage storage, const char* row,
                                                      int64_t column) {
  Stored<kWidth> stored = {};
  if (storage == Storage::kFloat32) {
    const Floats<kWidth> floats = load_floats<kWidth>(reinterpret_cast<const float*>(row) + column);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) stored.word[i] = float_bits(floats.value[i]);
  } else if constexpr (kWidth == 4) {
    const uint2 pairs = *reinterpret_cast<const uint2*>(row + 2 * column);
    stored.word[0] = pairs.x;
    stored.word[1] = pairs.y;
  } else {
    static_assert(kWidth == 1, "values of 2 bytes are loaded one by one or by four");
    stored.word[0] = *reinterpret_cast<const uint16_t*>(row + 2 * column);
  }
  return stored;
}
template <int kWidth>
__device__ __forceinline__ Floats<kWidth> to_floats(Storage storage, const Stored<kWidth>& stored) {
  Floats<kWidth> floats;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    const auto half = static_cast<uint16_t>(stored.word[i / 2] >> (16 * (i % 2)));
    if (storage == Storage::kFloat32) {
      floats.value[i] = float_from_bits(stored.word[i]);
    } else {
      floats.value[i] =
          storage == Storage::kBFloat16 ? bfloat16_to_float(half) : float16_to_float(half);
    }
  }
  return floats;
}

// A value rounded to one that the row can store.
__device__ __forceinline__ float rounded(Storage storage, float value) {
  if (storage == Storage::kBFloat16) return bfloat16_to_float(bfloat16_nearest(value));
  if (storage == Storage::kFloat16) return float16_to_float(float16_nearest(value));
  return value;
}

// Rounding of a row's values when they are stored.
struct Rounding {
  bool stochastic;
  int64_t seed;
  int64_t id;
  int64_t step;

  __device__ __forceinline__ uint64_t key(int tensor) const {
    return rounding_key(seed, id, step, tensor);
  }
};

template <int kWidth>
__device__ __forceinline__ void store_rounded(Storage storage, const Rounding& rounding, int tensor,
                                              char* row, int64_t column,
                                              const Floats<kWidth>& floats) {
  if (storage == Storage::kFloat32) {
    store_floats<kWidth>(reinterpret_cast<float*>(row) + column, floats);
    return;
  }
  const uint64_t key = rounding.stochastic ? rounding.key(tensor) : 0;
  uint32_t half[kWidth];
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    const float value = floats.value[i];
    if (rounding.stochastic) {
      const uint32_t word = rounding_word(key, static_cast<uint32_t>(column + i));
      half[i] = storage == Storage::kBFloat16 ? bfloat16_stochastic(value, word)
                                              : float16_stochastic(value, word);
    } else {
      half[i] = storage == Storage::kBFloat16 ? bfloat16_nearest(value) : float16_nearest(value);
    }
  }
  if constexpr (kWidth == 4) {
    *reinterpret_cast<uint2*>(row + 2 * column) =
        make_uint2(half[0] | half[1] << 16, half[2] | half[3] << 16);
  } else {
    *reinterpret_cast<uint16_t*>(row + 2 * column) = static_cast<uint16_t>(half[0]);
  }
}

// -- chunks of a row, which a group of lanes takes together --------------------------------------

// Values of a lane's columns of the chunk that begins at column `first`; 0 beyond the row.
template <class Group>
__device__ __forceinline__ auto load_chunk(const Group& group, Storage storage, const char* row,
                                           int64_t first, int64_t dim) {
  constexpr int kWidth = Group::kWidth;
  Floats<Group::kValues> values = {};
#pragma unroll
  for (int sweep = 0; sweep < Group::kSweeps; ++sweep) {
    const int64_t column = group.column(first, sweep);
    if (column >= dim) continue;
    const Floats<kWidth> part =
        to_floats<kWidth>(storage, load_stored<kWidth>(storage, row, column));
#pragma unroll
    for (int i = 0; i < kWidth; ++i) values.value[sweep * kWidth + i] = part.value[i];
  }
  return values;
}
template <class Group>
__device__ __forceinline__ void store_chunk(const Group& group, Storage storage,
                                            const Rounding& rounding, int tensor, char* row,
                                            int64_t first, int64_t dim,
                                            const Floats<Group::kValues>& values) {
  constexpr int kWidth = Group::kWidth;
#pragma unroll
  for (int sweep = 0; sweep < Group::kSweeps; ++sweep) {
    const int64_t column = group.column(first, sweep);
    if (column >= dim) continue;
    Floats<kWidth> part;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) part.value[i] = values.value[sweep * kWidth + i];
    store_rounded<kWidth>(storage, rounding, tensor, row, column, part);
  }
}

// -- 8-bit state: a chunk lies in one block ------------------------------------------------------

template <bool kUnsigned, class Group>
__device__ __forceinline__ auto load_block_chunk(const Group& group, const char* row, int64_t first,
                                                 int64_t dim) {
  constexpr int kWidth = Group::kWidth;
  static_assert(kBlockColumns % Group::kMostColumns == 0, "a chunk must not lie in two blocks");
  const float scale =
      *reinterpret_cast<const float*>(row + block_codes_bytes(dim) + first / kBlockColumns * 4);
  Floats<Group::kValues> values = {};
#pragma unroll
  for (int sweep = 0; sweep < Group::kSweeps; ++sweep) {
    const int64_t column = group.column(first, sweep);
    if (column >= dim) continue;
    uint32_t codes;
    if constexpr (kWidth == 4) {
      codes = *reinterpret_cast<const uint32_t*>(row + column);
    } else {
      codes = *reinterpret_cast<const uint8_t*>(row + column);
    }
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const auto code = static_cast<uint8_t>(codes >> (8 * i));
      values.value[sweep * kWidth + i] =
          kUnsigned ? unsigned_code_value(code, scale) : signed_code_value(code, scale);
    }
  }
  return values;
}
// All lanes of the group must call it, after all have loaded the chunk.
template <bool kUnsigned, class Group>
__device__ __forceinline__ void store_block_chunk(const Group& group, uint64_t key, char* row,
                                                  int64_t first, int64_t dim,
                                                  const Floats<Group::kValues>& values) {
  constexpr int kWidth = Group::kWidth;
  uint32_t most = 0;  // as bits, which have the order of magnitudes
#pragma unroll
  for (int i = 0; i < Group::kValues; ++i) {
    const uint32_t magnitude = float_bits(values.value[i]) & 0x7fffffffu;
    if (group.column(first, i / kWidth) < dim && magnitude > most) most = magnitude;
  }
  const float scale = block_scale(float_from_bits(group.largest(most)));
  const float inverse = block_inverse(scale);
  __syncwarp(group.mask());  // all lanes have read the scale; exchanging values does not order that
  if (group.lane() == 0) {
    *reinterpret_cast<float*>(row + block_codes_bytes(dim) + first / kBlockColumns * 4) = scale;
  }
#pragma unroll
  for (int sweep = 0; sweep < Group::kSweeps; ++sweep) {
    const int64_t column = group.column(first, sweep);
    if (column >= dim) continue;
    uint32_t codes = 0;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const float value = values.value[sweep * kWidth + i];
      const uint32_t word = rounding_word(key, static_cast<uint32_t>(column + i));
      const uint32_t code =
          kUnsigned ? unsigned_code(value, inverse, word) : signed_code(value, inverse, word);
      codes |= code << (8 * i);
    }
    if constexpr (kWidth == 4) {
      *reinterpret_cast<uint32_t*>(row + column) = codes;
    } else {
      *reinterpret_cast<uint8_t*>(row + column) = static_cast<uint8_t>(codes);
    }
  }
}

// -- state of a value per weight -----------------------------------------------------------------

template <bool kUnsigned, class Group>
__device__ __forceinline__ auto load_state(const Group& group, Storage storage, const char* row,
                                           int64_t first, int64_t dim) {
  if (storage == Storage::kBlockFloat8) {
    return load_block_chunk<kUnsigned>(group, row, first, dim);
  }
  return load_chunk(group, storage, row, first, dim);
}
template <bool kUnsigned, class Group>
__device__ __forceinline__ void store_state(const Group& group, Storage storage,
                                            const Rounding& rounding, int tensor, char* row,
                                            int64_t first, int64_t dim,
                                            const Floats<Group::kValues>& values) {
  if (storage == Storage::kBlockFloat8) {
    store_block_chunk<kUnsigned>(group, rounding.key(tensor), row, first, dim, values);
  } else {
    store_chunk(group, storage, rounding, tensor, row, first, dim, values);
  }
}

}  // namespace dynemb::cuda
