// FTRL-Proximal (McMahan et al. 2013, "Ad click prediction: a view from the trenches", algorithm
// 1).
#pragma once

#include "core/optimizer_step.h"

namespace dynemb {

// state[0] is the sum of squared gradients, state[1] the linear term z.
struct Ftrl : ByElement {
  static constexpr int kElementStates = 2;
  static constexpr unsigned kUnsignedStates = 1;

  template <class Values>
  static DYNEMB_HD Values linear(const OptimizerStep& s, Values g, Values weight,
                                 const Values* state) {
    const Values sigma = (square_root(state[0] + g * g) - square_root(state[0])) / s.lr;
    return state[1] + g - sigma * weight;
  }
  // What multiplies the shrunk linear term.
  static DYNEMB_HD float rate(const OptimizerStep& s, float sum) {
    return 1.0f / ((s.beta + sqrtf(sum)) / s.lr + s.ridge);
  }
  // -z, moved towards 0 by l1.
  static DYNEMB_HD float shrunk(const OptimizerStep& s, float z) {
    const float towards = z > 0.0f ? s.l1 - z : -s.l1 - z;
    return (z > 0.0f ? z : -z) <= s.l1 ? 0.0f : towards;
  }

  static DYNEMB_HD void element(const OptimizerStep& s, const RowNumbers&, float gradient,
                                float& weight, float* state) {
    const float g = decayed_gradient(s, gradient, weight);
    const float z = linear(s, g, weight, state);
    const float sum = state[0] + g * g;
    state[0] = sum;
    state[1] = z;
    weight = decayed_weight(s, rate(s, sum) * shrunk(s, z));
  }
};

}  // namespace dynemb
