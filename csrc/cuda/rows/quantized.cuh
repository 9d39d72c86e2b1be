// Rows of codes for a lookup's kernels (core/rows/quantized.h).
#pragma once

#include "core/rows/quantized.h"
#include "cuda/rows/tensors.cuh"

namespace dynemb::cuda {

// The codes of kWidth columns, and the scale of their row.
template <int kWidth>
struct Codes {
  uint32_t word;
  float scale;
  float bias;
};

struct CodeReader {
  template <int kWidth>
  using Loaded = Codes<kWidth>;

  // If lanes have four columns, dim is a multiple of 4, so all parts of a row are aligned to their
  // size, or for int4 to 2 bytes.
  template <int kWidth>
  static __device__ __forceinline__ Codes<kWidth> load(const SlabRows& slab, int64_t row,
                                                       int64_t column) {
    const auto* codes = reinterpret_cast<const uint8_t*>(slab.row(row));
    const uint8_t* behind = codes + code_bytes(slab.storage, slab.dim);
    if constexpr (kWidth == 4) {
      if (slab.storage == Storage::kInt4) {
        const auto* halves = reinterpret_cast<const uint16_t*>(behind);
        return {*reinterpret_cast<const uint16_t*>(codes + column / 2), float16_to_float(halves[0]),
                float16_to_float(halves[1])};
      }
      const auto* floats = reinterpret_cast<const float*>(behind);
      const float bias = slab.storage == Storage::kInt8 ? floats[1] : 0.0f;
      return {*reinterpret_cast<const uint32_t*>(codes + column), floats[0], bias};
    } else {
      static_assert(kWidth == 1, "codes are loaded one by one or by four");
      const RowScale scale = load_row_scale(slab.storage, behind);
      const uint32_t word =
          slab.storage == Storage::kInt4 ? codes[column / 2] >> (column % 2 * 4) : codes[column];
      return {word, scale.scale, scale.bias};
    }
  }

  template <int kWidth>
  static __device__ __forceinline__ Floats<kWidth> floats(const SlabRows& slab,
                                                          const Codes<kWidth>& loaded) {
    Floats<kWidth> values;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      if (slab.storage == Storage::kInt4) {
        values.value[i] = affine_value((loaded.word >> (4 * i)) & 15u, loaded.scale, loaded.bias);
      } else {
        const uint32_t code = (loaded.word >> (8 * i)) & 255u;
        values.value[i] = slab.storage == Storage::kInt8
                              ? affine_value(code, loaded.scale, loaded.bias)
                              : loaded.scale * float8_value(code);
      }
    }
    return values;
  }
};

}  // namespace dynemb::cuda
