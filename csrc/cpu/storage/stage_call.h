// Arguments of plan_moves_, stage_ and prefetch_, as a StageCall.
#pragma once

#include <vector>

#include "cpu/storage/cache.h"

namespace dynemb::cpu {

struct StagedIds {
  const Tensor& meta;
  const Tensor& ids;
  const Tensor& handles;
  const Tensor& offsets;
  const std::vector<int64_t>& feature_tables;
};

FeatureArgs staged_features(const char* op, const StagedIds& given);

// A lookup, with or without training. A lookup without training between two training steps begins
// an epoch of its own, because its rows are needed for this call only.
StageCall lookup_call(const char* op, const TierTensors& tiers, const FeatureArgs& features,
                      const StagedIds& given, bool trains);

// Fetches rows for a lookup that follows within `ahead` steps.
StageCall prefetch_call(const char* op, const TierTensors& tiers, const FeatureArgs& features,
                        const StagedIds& given, int64_t ahead);

}  // namespace dynemb::cpu
