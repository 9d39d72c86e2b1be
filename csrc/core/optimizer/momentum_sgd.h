// Stochastic gradient descent with momentum, plain (Polyak 1964) or Nesterov's in the form of
// Sutskever et al. 2013, as torch.optim.SGD: the first gradient of an element is not dampened.
#pragma once

#include "core/optimizer/step.h"

namespace dynemb {

struct MomentumSgd : ByElement {
  static constexpr int kElementStates = 1;

  template <class Values>
  static DYNEMB_HD void element(const OptimizerStep& s, const RowNumbers&, Values gradient,
                                Values& weight, Values* state) {
    const Values g = decayed_gradient(s, gradient, weight);
    const Values fresh = Values{} + 1.0f;
    const Values share = state[0] == Values{} ? fresh : Values{} + s.complement1;
    const Values velocity = s.momentum * state[0] + share * g;
    state[0] = velocity;
    const Values ahead = g + s.momentum * velocity;
    weight = decayed_weight(s, weight) - s.lr * (s.nesterov != 0.0f ? ahead : velocity);
  }
};

}  // namespace dynemb
