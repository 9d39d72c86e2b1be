// The life-cycle policies of a call, for ops of the CPU.
#pragma once

#include <cstdint>
#include <vector>

#include "core/policy/decisions.h"
#include "cpu/index/args.h"

namespace dynemb::cpu {

// Numbers of a policy that are the same for all ids of a call (core/policy/waiting.h).
struct WaitingNumbers {
  int64_t time;
  int64_t least_admitted;  // for the policy's own threshold
};

struct PolicyArgs {
  const int64_t* rows;  // nullptr: no table has a policy
  const int64_t* clock;
  std::vector<int64_t> of_feature;
  std::vector<WaitingNumbers> waiting;  // by policy

  bool empty() const { return rows == nullptr; }
  const int64_t* row(int64_t policy) const { return rows + policy * kPolicyColumns; }
  // Changes of scores by a feature's lookups.
  ScoreUpdate update(int64_t feature, int64_t table) const {
    return empty() ? step_update(clock) : policy_update(row(of_feature[feature]), clock, table);
  }
};

// Also checks the values of the tensors.
PolicyArgs policy_args(const IndexArgs& index, const FeatureArgs& features, const Tensor& policy,
                       const Tensor& clock, const Tensor& sketch,
                       const std::vector<int64_t>& feature_policies);

}  // namespace dynemb::cpu
