#include "cpu/storage/stage_call.h"

namespace dynemb::cpu {

FeatureArgs staged_features(const char* op, const StagedIds& given) {
  check_tensor(CallContext(op), "meta", given.meta, ScalarType::Long);
  check_size(op, "meta", given.meta, 1, kMetaColumns);
  return feature_args(op, given.ids, given.offsets, given.feature_tables, given.meta.size(0));
}

StageCall lookup_call(const char* op, const TierTensors& tiers, const FeatureArgs& features,
                      const StagedIds& given, bool trains) {
  const CallContext call(op);
  const int64_t* handles = id_words(call, "handles", given.handles, features.count);
  std::vector<int64_t> slab_of = slabs_of_tables(call, given.meta, tiers.slabs.size());
  const bool begins = !trains && tiers.head[kTierTraining] == 0;
  const uint32_t epoch = static_cast<uint32_t>(tiers.head[kTierEpoch]) + (begins ? 1 : 0);
  return {op,          &tiers,  &features, std::move(slab_of), handles, trains, trains, epoch,
          kTierMisses, nullptr, nullptr};
}

StageCall prefetch_call(const char* op, const TierTensors& tiers, const FeatureArgs& features,
                        const StagedIds& given, int64_t ahead) {
  const CallContext call(op);
  DYNEMB_CHECK(ahead >= 1 && ahead <= INT32_MAX, "dynemb::", op, ": ahead is ", ahead,
               ", expected 1 at least: the steps until the rows are looked up");
  const int64_t* handles = id_words(call, "handles", given.handles, features.count);
  const uint32_t epoch =
      static_cast<uint32_t>(tiers.head[kTierEpoch]) + static_cast<uint32_t>(ahead);
  return {op,
          &tiers,
          &features,
          slabs_of_tables(call, given.meta, tiers.slabs.size()),
          handles,
          false,
          true,
          epoch,
          kTierPrefetched,
          nullptr,
          nullptr};
}

}  // namespace dynemb::cpu
