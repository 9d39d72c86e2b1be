// The life-cycle policies of a call, checked.
#pragma once

#include <cstdint>
#include <vector>

#include "core/policy/decisions.h"
#include "cpu/index/view.h"

namespace dynemb::cpu {

struct PolicyView {
  const int64_t* rows = nullptr;  // nullptr: no table has a policy
  const int64_t* clock = nullptr;
  std::vector<int64_t> of_feature;

  bool empty() const { return rows == nullptr; }
  const int64_t* row(int64_t policy) const { return rows + policy * kPolicyColumns; }
  // How a feature's lookups change scores.
  ScoreUpdate update(int64_t feature, int64_t table) const {
    return empty() ? step_update(clock) : policy_update(row(of_feature[feature]), clock, table);
  }
};

PolicyView policy_view(const IndexView& index, const FeatureIds& features, const Tensor& policy,
                       const Tensor& clock, const Tensor& sketch,
                       const std::vector<int64_t>& feature_policies);

}  // namespace dynemb::cpu
