// Partial row-wise Adam: first moments per weight, one second moment per row, of the mean of the
// squared gradients of the row (FBGEMM's partial_rowwise_adam).
#pragma once

#include "core/optimizer/adam.h"

namespace dynemb {

struct PartialRowwiseAdam : ByElement {
  static constexpr int kElementStates = 1;
  static constexpr int kRowStates = 1;
  static constexpr int kSums = 1;
  static constexpr RowSteps kRowSteps = RowSteps::kOptional;

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
    return {s.step_size / (sqrtf(v) * s.root_correction2 + s.eps), 0.0f};
  }
  template <class Values>
  static DYNEMB_HD void element(const OptimizerStep& s, const RowNumbers& row, Values gradient,
                                Values& weight, Values* state) {
    const Values m = first_moment(s, decayed_gradient(s, gradient, weight), state);
    state[0] = m;
    weight = decayed_weight(s, weight) - row.first * m;
  }
};

}  // namespace dynemb
