// Rows on the device: slabs, initial values, the ids of a lookup.
#pragma once

#include "core/columns.h"
#include "core/index/handle.h"
#include "core/rows/initializer.h"
#include "core/rows/pooling.h"
#include "core/rows/slab_state.h"
#include "cuda/index/tensors.cuh"
#include "cuda/rows/storage.cuh"

namespace dynemb::cuda {

// The rows of one dim and dtype, or of one dim and format.
struct SlabRows {
  char* weights;         // [rows, dim]
  int32_t* generations;  // [rows]
  int64_t rows;
  int64_t dim;
  Storage storage;    // of the weights
  int64_t row_bytes;  // of the weights
  bool only_of_dim;   // whether other slabs lack this dim

  __device__ __forceinline__ char* row(int64_t number) const {
    return weights + number * row_bytes;
  }
};

// Initializers of a table's new rows.
struct TableInit {
  const double* init_data;
  int64_t seed;
  int64_t first_column;  // in the rows of a wider table
  int64_t init_begin;
  int64_t init_count;
  int64_t default_begin;
  int64_t default_count;
  int64_t refused_begin;
  int64_t refused_count;
};

struct RowArgs {
  const int64_t* meta;
  const double* init_data;
};

__device__ __forceinline__ TableInit table_init(const RowArgs& args, int64_t table) {
  const int64_t* m = args.meta + table * kMetaColumns;
  return {args.init_data,       m[kMetaSeed],         m[kMetaFirstColumn],
          m[kMetaInitBegin],    m[kMetaInitCount],    m[kMetaDefaultBegin],
          m[kMetaDefaultCount], m[kMetaRefusedBegin], m[kMetaRefusedCount]};
}

// Whether the rows of a table lie in a slab that has the table's dim.
__device__ __forceinline__ bool is_slab_of(const RowArgs& args, const SlabRows& slab,
                                           int64_t slab_number, int64_t table) {
  return slab.only_of_dim || args.meta[table * kMetaColumns + kMetaSlab] == slab_number;
}

// Columns column .. column + kWidth - 1 of an initial row, as floats that a row of this storage can
// hold; `column` is a multiple of kWidth.
template <int kWidth>
__device__ __forceinline__ Floats<kWidth> initial_floats(Storage storage, const TableInit& init,
                                                         int64_t begin, int64_t count, int64_t id,
                                                         int64_t column) {
  const Philox4 words =
      row_random_words(init.seed, id, static_cast<uint32_t>((init.first_column + column) / 4));
  Floats<kWidth> result;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    // no index known only at run time: it would put the words into local memory
    const int lane = kWidth == 4 ? i : static_cast<int>((column + i) % 4);
    const uint32_t low = lane == 0 ? words.word[0] : words.word[1];
    const uint32_t high = lane == 2 ? words.word[2] : words.word[3];
    const uint32_t word = lane < 2 ? low : high;
    result.value[i] =
        rounded(storage, initial_value(init.init_data, begin, count, column + i, word));
  }
  return result;
}

// Source of an id's values: a row number, or one of these.
enum ValueSource : int64_t {
  kFromZeros = -1,    // a stale handle, or one without a row
  kFromInitial = -2,  // a row that has not been written yet
  kFromDefault = -3,  // an id without a row
  kFromRefused = -4,  // an id that was refused a row
  kFromPadding = -5   // zeros, and not counted in a mean
};

// Whether values are computed from the id.
__device__ __forceinline__ bool is_computed(int64_t source) {
  return source <= kFromInitial && source >= kFromRefused;
}

__device__ __forceinline__ int64_t value_source(const SlabRows& slab, int64_t handle,
                                                const ErrorSink& errors) {
  if (handle == kPaddingHandle) return kFromPadding;
  if (handle < 0) return handle == kRefusedHandle ? kFromRefused : kFromDefault;
  const int64_t row = handle_row(handle);
  if (row >= slab.rows) {
    errors.report(kErrorHandle, row);
    return kFromZeros;
  }
  switch (row_status(handle, slab.generations[row])) {
    case RowStatus::kLive:
      return row;
    case RowStatus::kUnwritten:
      return kFromInitial;
    default:
      return kFromZeros;
  }
}

// Reader of rows of floats: loads, several of which can be in flight, and their values. CodeReader
// (quantized.cuh) reads rows of codes.
struct FloatReader {
  template <int kWidth>
  using Loaded = Stored<kWidth>;

  template <int kWidth>
  static __device__ __forceinline__ Stored<kWidth> load(const SlabRows& slab, int64_t row,
                                                        int64_t column) {
    return load_stored<kWidth>(slab.storage, slab.row(row), column);
  }
  template <int kWidth>
  static __device__ __forceinline__ Floats<kWidth> floats(const SlabRows& slab,
                                                          const Stored<kWidth>& loaded) {
    return to_floats<kWidth>(slab.storage, loaded);
  }
};

// kWidth values of an id; zeros for padding and stale rows.
template <int kWidth, class Reader = FloatReader>
__device__ __forceinline__ Floats<kWidth> source_floats(const SlabRows& slab, const TableInit& init,
                                                        int64_t source, int64_t id,
                                                        int64_t column) {
  if (source >= 0) {
    return Reader::template floats<kWidth>(slab,
                                           Reader::template load<kWidth>(slab, source, column));
  }
  if (source == kFromInitial) {
    return initial_floats<kWidth>(slab.storage, init, init.init_begin, init.init_count, id, column);
  }
  if (source == kFromDefault) {
    return initial_floats<kWidth>(slab.storage, init, init.default_begin, init.default_count, id,
                                  column);
  }
  if (source == kFromRefused) {
    return initial_floats<kWidth>(slab.storage, init, init.refused_begin, init.refused_count, id,
                                  column);
  }
  return zero_floats<kWidth>();
}

// A lookup: its ids, handles and bags.
struct LookupArgs {
  FeatureArgs features;
  const int64_t* handles;
  const float* id_weights;  // nullptr: all 1
  int64_t pooling;
  int64_t columns;        // row width of output and gradient
  const int64_t* column;  // first column of each feature, on the device
  const int64_t* slab;    // slab of each feature, on the device; -dim if several have its dim
};

}  // namespace dynemb::cuda
