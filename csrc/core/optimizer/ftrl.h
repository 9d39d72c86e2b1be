// FTRL-Proximal (McMahan et al. 2013, "Ad click prediction: a view from the trenches", algorithm
// 1).
#pragma once

#include "core/optimizer/step.h"

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
  // Factor of the shrunk linear term.
  template <class Values>
  static DYNEMB_HD Values rate(const OptimizerStep& s, Values sum) {
    return 1.0f / ((s.beta + square_root(sum)) / s.lr + s.ridge);
  }
  // -z, moved towards 0 by l1.
  template <class Values>
  static DYNEMB_HD Values shrunk(const OptimizerStep& s, Values z) {
    const Values towards = z > Values{} ? s.l1 - z : -s.l1 - z;
    const Values magnitude = z > Values{} ? z : -z;
    return magnitude <= Values{} + s.l1 ? Values{} : towards;
  }

  template <class Values>
  static DYNEMB_HD void element(const OptimizerStep& s, const RowNumbers&, Values gradient,
                                Values& weight, Values* state) {
    const Values g = decayed_gradient(s, gradient, weight);
    const Values z = linear(s, g, weight, state);
    const Values sum = state[0] + g * g;
    state[0] = sum;
    state[1] = z;
    weight = decayed_weight(s, rate(s, sum) * shrunk(s, z));
  }
};

}  // namespace dynemb
