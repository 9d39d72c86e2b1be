// Adagrad (Duchi, Hazan, Singer 2011), as torch.optim.Adagrad.
#pragma once

#include "core/optimizer/step.h"

namespace dynemb {

struct Adagrad : ByElement {
  static constexpr int kElementStates = 1;
  static constexpr unsigned kUnsignedStates = 1;

  template <class Values>
  static DYNEMB_HD void element(const OptimizerStep& s, const RowNumbers&, Values gradient,
                                Values& weight, Values* state) {
    const Values g = decayed_gradient(s, gradient, weight);
    const Values sum = state[0] + g * g;
    state[0] = sum;
    weight = decayed_weight(s, weight) - s.lr * (g / (square_root(sum) + s.eps));
  }
};

}  // namespace dynemb
