// Row-wise Adagrad: one accumulator per row, fed with the mean of the squared gradients of the row
// (Gupta, Bennett, Weston 2014; FBGEMM's exact_rowwise_adagrad).
#pragma once

#include "core/optimizer/step.h"

namespace dynemb {

struct RowwiseAdagrad : ByElement {
  static constexpr int kElementStates = 0;
  static constexpr int kRowStates = 1;
  static constexpr int kSums = 1;

  template <class Values>
  static DYNEMB_HD void add_terms(const OptimizerStep& s, Values gradient, Values weight,
                                  const Values*, Values* sums) {
    const Values g = decayed_gradient(s, gradient, weight);
    sums[0] += g * g;
  }
  static DYNEMB_HD RowNumbers row(const OptimizerStep& s, const float* sums, float dim,
                                  float* row_state) {
    const float sum = row_state[0] + sums[0] / dim;
    row_state[0] = sum;
    return {s.lr / (sqrtf(sum) + s.eps), 0.0f};
  }
  template <class Values>
  static DYNEMB_HD void element(const OptimizerStep& s, const RowNumbers& row, Values gradient,
                                Values& weight, Values*) {
    const Values g = decayed_gradient(s, gradient, weight);
    weight = decayed_weight(s, weight) - row.first * g;
  }
};

}  // namespace dynemb
