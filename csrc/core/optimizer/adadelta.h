// Adadelta (Zeiler 2012), as torch.optim.Adadelta.
#pragma once

#include "core/optimizer/step.h"

namespace dynemb {

// state[0] is the mean square of gradients, state[1] that of steps before lr.
struct Adadelta : ByElement {
  static constexpr int kElementStates = 2;
  static constexpr unsigned kUnsignedStates = 3;

  template <class Values>
  static DYNEMB_HD void element(const OptimizerStep& s, const RowNumbers&, Values gradient,
                                Values& weight, Values* state) {
    const Values g = decayed_gradient(s, gradient, weight);
    const Values v = s.beta2 * state[0] + s.complement2 * g * g;
    const Values move = square_root(state[1] + s.eps) / square_root(v + s.eps) * g;
    state[0] = v;
    state[1] = s.beta2 * state[1] + s.complement2 * move * move;
    weight = decayed_weight(s, weight) - s.lr * move;
  }
};

}  // namespace dynemb
