// Stochastic gradient descent (torch.optim.SGD without momentum).
#pragma once

#include "core/optimizer/step.h"

namespace dynemb {

struct Sgd : ByElement {
  static constexpr int kElementStates = 0;  // state tensors with one value per weight

  template <class Values>
  static DYNEMB_HD void element(const OptimizerStep& s, const RowNumbers&, Values gradient,
                                Values& weight, Values*) {
    const Values g = decayed_gradient(s, gradient, weight);
    weight = decayed_weight(s, weight) - s.lr * g;
  }
};

}  // namespace dynemb
