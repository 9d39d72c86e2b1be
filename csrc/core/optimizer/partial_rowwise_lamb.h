// LAMB with one second moment per row, of the mean of the squared gradients of the row (FBGEMM's
// partial_rowwise_lamb).
#pragma once

#include "core/optimizer/lamb.h"

namespace dynemb {

struct PartialRowwiseLamb : ByElement {
  static constexpr int kElementStates = 1;
  static constexpr int kRowStates = 1;
  static constexpr int kSums = 4;
  static constexpr bool kSumsWeights = true;
  static constexpr RowSteps kRowSteps = RowSteps::kOptional;

  // The direction is a * m + b * w with a and b of the row, so its norm follows from four sums.
  template <class Values>
  static DYNEMB_HD void add_terms(const OptimizerStep& s, Values gradient, Values weight,
                                  const Values* state, Values* sums) {
    const Values g = decayed_gradient(s, gradient, weight);
    const Values m = first_moment(s, g, state);
    sums[0] += g * g;
    sums[1] += weight * weight;
    sums[2] += m * m;
    sums[3] += m * weight;
  }
  static DYNEMB_HD RowNumbers row(const OptimizerStep& s, const float* sums, float dim,
                                  float* row_state) {
    const float v = s.beta2 * row_state[0] + s.complement2 * (sums[0] / dim);
    row_state[0] = v;
    const float a = s.root_correction1 / (sqrtf(v) * s.root_correction2 + s.eps);
    const float b = s.weight_decay - s.l2;
    const float squares = a * a * sums[2] + 2.0f * a * b * sums[3] + b * b * sums[1];
    const float rate = s.lr * trust_ratio(sums[1], squares);
    return {rate * a, rate * b};
  }
  template <class Values>
  static DYNEMB_HD void element(const OptimizerStep& s, const RowNumbers& row, Values gradient,
                                Values& weight, Values* state) {
    const Values m = first_moment(s, decayed_gradient(s, gradient, weight), state);
    state[0] = m;
    weight -= row.first * m + row.second * weight;
  }
};

}  // namespace dynemb
