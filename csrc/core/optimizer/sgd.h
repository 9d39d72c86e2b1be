// Stochastic gradient descent (torch.optim.SGD without momentum).
#pragma once

#include "core/optimizer_step.h"

namespace dynemb {

struct Sgd : ByElement {
  static constexpr int kElementStates = 0;  // state tensors with one value per weight

  static DYNEMB_HD void element(const OptimizerStep& s, const RowNumbers&, float gradient,
                                float& weight, float*) {
    const float g = decayed_gradient(s, gradient, weight);
    weight = decayed_weight(s, weight) - s.lr * g;
  }
};

}  // namespace dynemb
