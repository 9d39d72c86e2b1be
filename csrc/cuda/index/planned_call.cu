#include "cuda/index/planned_call.h"

namespace dynemb::cuda {
namespace {

// A thread per id: reads 8 bytes in order, and 4 at random for an id that the plan is about.
__global__ void count_ids(FeatureArgs features, DedupeTable dedupe, Plan plan, const int64_t* work,
                          int32_t* block_counts) {
  if (plan.head[kPlanTouched] == 0) return;
  const int64_t i = thread_number();
  const bool first = is_first(features, dedupe, work, i);
  const int64_t feature = first ? features.feature_of(i) : 0;
  count_firsts(plan, first, feature, block_counts);
}

}  // namespace

void count_distinct(const Call& call, const PlannedCall& planned, const int64_t* work) {
  call.launch(count_ids, planned.blocks * kRankBlock, kRankBlock, planned.features, planned.dedupe,
              planned.plan, work, planned.block_counts);
}

}  // namespace dynemb::cuda
