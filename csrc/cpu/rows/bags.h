// BagArgs for rows of a plain tensor, and gradients of bags.
#pragma once

#include <optional>

#include "arguments/pool_rows.h"
#include "cpu/index/args.h"
#include "cpu/rows/floats.h"

namespace dynemb::cpu {

constexpr int64_t kAheadRows = 16;      // rows prefetched ahead of the one in use
constexpr int64_t kBagsOfTile = 256;    // of one feature: the unit of work of the forward
constexpr int64_t kColumnsOfUnit = 16;  // one cache line: the unit of work of the backward

struct BagArgs {
  const int64_t* position;
  const int64_t* offset;
  const float* weight;  // of each position; nullptr: all 1
  int64_t ids;
  int64_t batch;
  int64_t features;
  int64_t dim;

  int64_t columns() const { return features * dim; }
};

// Also checks all values: rows are then accessed without checks.
BagArgs bag_args(const char* op, const Tensor& positions, const Tensor& offsets, int64_t features,
                 const std::optional<Tensor>& weights, int64_t rows, int64_t dim);

DYNEMB_INLINE void prefetch_row(const float* row, int64_t dim) {
  for (int64_t c = 0; c < dim; c += kColumnsOfUnit) __builtin_prefetch(row + c);
}

// Adds columns [begin, end) of factor * from to those of `row`.
template <bool kScaled>
DYNEMB_INLINE void add_columns(float* row, const float* from, float factor, int64_t begin,
                               int64_t end) {
  int64_t c = begin;
  for (; c + kFloats <= end; c += kFloats) {
    Floats8 term = load_floats(from + c);
    if constexpr (kScaled) term = factor * term;
    store_floats(row + c, load_floats(row + c) + term);
  }
  for (; c < end; ++c) row[c] += kScaled ? factor * from[c] : from[c];
}

// Runs f(feature, first, last) over the bags of all features, in tiles.
template <class F>
void for_each_tile(const BagArgs& bags, const F& f) {
  const int64_t tiles = (bags.batch + kBagsOfTile - 1) / kBagsOfTile;
  parallel_units(tiles * bags.features, bags.ids, [&](int64_t first, int64_t last) {
    for (int64_t unit = first; unit < last; ++unit) {
      const int64_t begin = unit % tiles * kBagsOfTile;
      const int64_t end = begin + kBagsOfTile;
      f(unit / tiles, begin, end < bags.batch ? end : bags.batch);
    }
  });
}

// Runs f(first column, end) over the columns of a row: each thread has its own columns, so that
// sums keep the order of bags.
template <class F>
void for_each_column_unit(const BagArgs& bags, const F& f) {
  const int64_t units = (bags.dim + kColumnsOfUnit - 1) / kColumnsOfUnit;
  parallel_units(units, bags.ids, [&](int64_t first, int64_t last) {
    const int64_t end = last * kColumnsOfUnit;
    f(first * kColumnsOfUnit, end < bags.dim ? end : bags.dim);
  });
}

}  // namespace dynemb::cpu
