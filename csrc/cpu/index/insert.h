// Handles of the ids of a training lookup.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "arguments/tensors.h"

namespace dynemb::cpu {

// Implements find_or_insert_; errors name `op`.
Tensor insert_handles(const char* op, const Tensor& buckets, const Tensor& scores,
                      const Tensor& tables, const Tensor& slabs, const Tensor& free_rows,
                      const Tensor& sketch, const Tensor& evicted, const Tensor& meta,
                      const Tensor& policy, const Tensor& clock, const Tensor& ids,
                      const Tensor& offsets, const std::optional<Tensor>& admit,
                      const std::vector<int64_t>& feature_tables,
                      const std::vector<int64_t>& feature_policies);

}  // namespace dynemb::cpu
