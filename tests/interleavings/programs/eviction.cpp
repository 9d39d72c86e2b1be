// Threads claim victims for new ids, of which earlier ones come first:
// csrc/cpu/index/eviction.cpp.
#include "cpu/index/eviction.cpp"  // claim_victims is not in the header

#include <algorithm>
#include <iterator>

#include "checker.h"

std::atomic<int> dynemb::cpu::active_simd_level{static_cast<int>(SimdLevel::kBase)};

namespace {

using namespace dynemb;
using namespace dynemb::cpu;
using interleavings::require;

constexpr int64_t kBuckets = kWholeIndexBuckets + kGroupBuckets, kNewIds = 3;
constexpr int64_t kStep = 100;
// the best victim, and the second one: in a bucket that all new ids search
constexpr int64_t kFirst = (kGroupBuckets - 1) * kBucketWidth, kSecond = kFirst + 1;

alignas(64) int64_t lines[kBuckets * kBucketWords], steps[kBuckets * kBucketWidth];
int64_t policy[kPolicyColumns];
Claims claims;

void fill() {
  for (int64_t slot = 0; slot < kBuckets * kBucketWidth; ++slot) {
    int64_t* line = lines + slot / kBucketWidth * kBucketWords;
    line[slot % kBucketWidth] = 1000 + slot;
    line[kBucketWidth + slot % kBucketWidth] = 1 + slot;
    steps[slot] = kStep;
  }
  steps[kFirst] = 10;
  steps[kSecond] = 11;
  policy[kPolicyProtectedSteps] = 1;
  policy[kPolicyEvictionWord] = 0;
  claims = {};
  claims.tables = {{lines, steps, 1, kBuckets, 0, false, 0}};
  claims.policies = {policy};
  claims.exhausted = {INT64_MAX};
  claims.step = kStep;
  // the first in memory has the last order
  for (int64_t i = 0; i < kNewIds; ++i) {
    const auto order = static_cast<int32_t>(kNewIds - 1 - i);
    claims.evictors.push_back({i, -1, 0, order, false});
  }
  claims.place = {2, 1, 0};
}

std::vector<int64_t> victims() {
  std::vector<int64_t> result;
  for (const Evictor& evictor : claims.evictors) {
    result.push_back(evictor.failed ? -1 : claimed_victim(claims, evictor));
  }
  return result;
}

interleavings::Execution begin() {
  fill();
  interleavings::share(steps, sizeof steps, interleavings::Access::kGuarded);
  interleavings::share(claims.evictors.data(), kNewIds * sizeof(Evictor),
                       interleavings::Access::kGuarded);
  interleavings::Execution execution;
  for (int64_t i = 0; i < kNewIds; ++i) {
    execution.threads.push_back([i] { claim_victims(&claims, i, i + 1); });
  }
  execution.check = [] {
    require(victims() == std::vector<int64_t>{-1, kSecond, kFirst},
            "victims depend on the order of threads");
  };
  return execution;
}

}  // namespace

int main(int argc, char** argv) { return interleavings::explore(argc, argv, begin); }
