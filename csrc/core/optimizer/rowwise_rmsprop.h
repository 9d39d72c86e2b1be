// RMSprop with one mean square per row, and weights that shrink by the steps since the row's last
// update (Li, Lyu 2026, "Adaptive regularization for large-scale sparse feature embedding models",
// algorithm 2; FBGEMM's rowwise_rmsprop_ar).
#pragma once

#include "core/optimizer/step.h"

namespace dynemb {

struct RowwiseRmsprop : ByElement {
  static constexpr int kElementStates = 0;
  static constexpr int kRowStates = 1;
  static constexpr int kSums = 1;
  static constexpr RowSteps kRowSteps = RowSteps::kLastSeen;

  // The first update of a row counts as one step after the last.
  static DYNEMB_HD void since(OptimizerStep& s, int32_t last) {
    const double steps = last == 0 ? 1.0 : static_cast<double>(s.step - last);
    const double left = 1.0 - s.shrink_rate * steps;
    s.shrinkage = left > s.min_shrinkage ? static_cast<float>(left) : s.min_shrinkage;
  }
  template <class Values>
  static DYNEMB_HD void add_terms(const OptimizerStep& s, Values gradient, Values weight,
                                  const Values*, Values* sums) {
    const Values g = decayed_gradient(s, gradient, weight);
    sums[0] += g * g;
  }
  static DYNEMB_HD RowNumbers row(const OptimizerStep& s, const float* sums, float dim,
                                  float* row_state) {
    const float v = s.beta2 * row_state[0] + s.complement2 * (sums[0] / dim);
    row_state[0] = v;
    return {s.lr / (sqrtf(v) + s.eps), s.shrinkage};
  }
  template <class Values>
  static DYNEMB_HD void element(const OptimizerStep& s, const RowNumbers& row, Values gradient,
                                Values& weight, Values*) {
    const Values g = decayed_gradient(s, gradient, weight);
    weight = row.second * decayed_weight(s, weight) - row.first * g;
  }
};

}  // namespace dynemb
