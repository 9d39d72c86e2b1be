// LAMB (You et al. 2020): Adam's direction plus weight decay, times |w| / |direction| of the row; 1
// if either norm is 0.
#pragma once

#include "core/optimizer/adam.h"

namespace dynemb {

DYNEMB_HD float trust_ratio(float weight_squares, float direction_squares) {
  const float weight = sqrtf(weight_squares);
  const float direction = sqrtf(direction_squares);
  return weight > 0.0f && direction > 0.0f ? weight / direction : 1.0f;
}

struct Lamb : AdamBase {
  static constexpr int kSums = 2;
  static constexpr bool kSumsWeights = true;

  // Decoupled weight decay is part of the direction.
  template <class Values>
  static DYNEMB_HD Values direction(const OptimizerStep& s, Values m, Values v, Values weight) {
    const float decay = s.weight_decay - s.l2;
    return (s.root_correction1 * m) / (square_root(v) * s.root_correction2 + s.eps) +
           decay * weight;
  }
  template <class Values>
  static DYNEMB_HD void add_terms(const OptimizerStep& s, Values gradient, Values weight,
                                  const Values* state, Values* sums) {
    const Values g = decayed_gradient(s, gradient, weight);
    const Values u = direction(s, first_moment(s, g, state), second_moment(s, g, state), weight);
    sums[0] += weight * weight;
    sums[1] += u * u;
  }
  static DYNEMB_HD RowNumbers row(const OptimizerStep& s, const float* sums, float, float*) {
    return {s.lr * trust_ratio(sums[0], sums[1]), 0.0f};
  }
  template <class Values>
  static DYNEMB_HD void element(const OptimizerStep& s, const RowNumbers& row, Values gradient,
                                Values& weight, Values* state) {
    const Values g = decayed_gradient(s, gradient, weight);
    const Values m = first_moment(s, g, state);
    const Values v = second_moment(s, g, state);
    state[0] = m;
    state[1] = v;
    weight -= row.first * direction(s, m, v, weight);
  }
};

}  // namespace dynemb
