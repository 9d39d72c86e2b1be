// RMSprop (Tieleman, Hinton 2012), epsilon outside the root as in torch.optim.RMSprop, not
// centered.
#pragma once

#include "core/optimizer/step.h"

namespace dynemb {

struct Rmsprop : ByElement {
  static constexpr int kElementStates = 1;
  static constexpr unsigned kUnsignedStates = 1;

  // The gradient over the root of its mean square; updates state[0].
  template <class Values>
  static DYNEMB_HD Values scaled(const OptimizerStep& s, Values gradient, Values weight,
                                 Values* state) {
    const Values g = decayed_gradient(s, gradient, weight);
    const Values v = s.beta2 * state[0] + s.complement2 * g * g;
    state[0] = v;
    return g / (square_root(v) + s.eps);
  }
  template <class Values>
  static DYNEMB_HD void element(const OptimizerStep& s, const RowNumbers&, Values gradient,
                                Values& weight, Values* state) {
    const Values move = scaled(s, gradient, weight, state);
    weight = decayed_weight(s, weight) - s.lr * move;
  }
};

struct RmspropMomentum : Rmsprop {
  static constexpr int kElementStates = 2;

  template <class Values>
  static DYNEMB_HD void element(const OptimizerStep& s, const RowNumbers&, Values gradient,
                                Values& weight, Values* state) {
    const Values move = scaled(s, gradient, weight, state);
    const Values velocity = s.momentum * state[1] + move;
    state[1] = velocity;
    weight = decayed_weight(s, weight) - s.lr * velocity;
  }
};

}  // namespace dynemb
