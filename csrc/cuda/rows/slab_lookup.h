// A lookup, and the gradient of its weights, for the features of one slab.
#pragma once

#include "cuda/rows/args.h"

namespace dynemb::cuda {

struct SlabLookup {
  SlabRows slab;
  int64_t slab_number;
  LookupArgs lookup;
  RowArgs rows;
  ErrorSink errors;
  const int64_t* slab_features;
  int64_t slab_feature_count;

  struct Bag {
    int64_t feature;
    int64_t row;     // of output and gradient
    int64_t number;  // among the bags of all features
    int64_t begin;   // of its ids
    int64_t end;
    int64_t offset;  // in output and gradient
  };

  // Bags of the slab's features, and one of them.
  __host__ __device__ int64_t bags() const { return slab_feature_count * lookup.features.batch; }
  __device__ __forceinline__ Bag bag(int64_t i) const {
    const FeatureArgs& features = lookup.features;
    const int64_t feature = slab_features[i / features.batch];
    const int64_t row = i % features.batch;
    const int64_t number = feature * features.batch + row;
    return {feature,
            row,
            number,
            features.offset(number),
            features.offset(number + 1),
            row * lookup.columns + lookup.column[feature]};
  }
  // Whether the rows of a feature's table lie in this slab, and not in another one of the same dim.
  __device__ __forceinline__ bool has_rows_of(int64_t feature) const {
    return is_slab_of(rows, slab, slab_number, lookup.features.table[feature]);
  }
};

inline SlabLookup slab_lookup(const Call& call, const GroupRows& rows, const LookupCall& lookup,
                              const LookupWords& uploaded, size_t slab) {
  return {rows.slabs[slab],
          static_cast<int64_t>(slab),
          lookup.args,
          rows.args,
          error_sink(call),
          uploaded.slab_features[slab],
          static_cast<int64_t>(lookup.slab_features[slab].size())};
}

}  // namespace dynemb::cuda
