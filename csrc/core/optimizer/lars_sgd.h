// LARS (You, Gitman, Ginsburg 2017) per row: SGD with momentum at the rate lr * trust * |w| / (|g|
// + weight_decay * |w|); lr if either norm is 0.
#pragma once

#include "core/optimizer/step.h"

namespace dynemb {

struct LarsSgd : ByElement {
  static constexpr int kElementStates = 1;
  static constexpr int kSums = 2;
  static constexpr bool kSumsWeights = true;

  template <class Values>
  static DYNEMB_HD void add_terms(const OptimizerStep&, Values gradient, Values weight,
                                  const Values*, Values* sums) {
    sums[0] += weight * weight;
    sums[1] += gradient * gradient;
  }
  static DYNEMB_HD RowNumbers row(const OptimizerStep& s, const float* sums, float, float*) {
    const float weight = sqrtf(sums[0]);
    const float gradient = sqrtf(sums[1]);
    const bool scaled = weight > 0.0f && gradient > 0.0f;
    const float ratio = s.trust * weight / (gradient + s.l2 * weight);
    return {scaled ? s.lr * ratio : s.lr, 0.0f};
  }
  template <class Values>
  static DYNEMB_HD void element(const OptimizerStep& s, const RowNumbers& row, Values gradient,
                                Values& weight, Values* state) {
    const Values g = decayed_gradient(s, gradient, weight);
    const Values velocity = s.momentum * state[0] + row.first * g;
    state[0] = velocity;
    weight = decayed_weight(s, weight) - velocity;
  }
};

}  // namespace dynemb
