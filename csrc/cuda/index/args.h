// Host side of the index ops: checked tensors as kernel arguments.
#pragma once

#include <vector>

#include "arguments/index.h"
#include "cuda/index/tensors.cuh"
#include "cuda/runtime/launch.h"

namespace dynemb::cuda {

// `scores` may be nullptr for ops that do not use them.
IndexArgs index_args(const Call& call, const Tensor& buckets, const Tensor* scores,
                     const Tensor& tables, const Tensor& meta);

// Set `table` to feature_tables on the device.
FeatureArgs feature_args(const Call& call, const IdTensors& ids, const int64_t* table);
FeatureArgs feature_args(const Call& call, const Tensor& ids, const Tensor& offsets,
                         const std::vector<int64_t>& feature_tables, int64_t table_count,
                         const int64_t* table);

inline ErrorSink error_sink(const Call& call) { return {call.error, call.op_number}; }

}  // namespace dynemb::cuda
