// Stochastic gradient descent with L2 weight decay (torch.optim.SGD without momentum).
#pragma once

#include "core/optimizer_step.h"

namespace dynemb {

struct Sgd {
  static constexpr int kElementStates = 0;  // state tensors with one value per weight
  static constexpr int kRowStates = 0;      // state tensors with one value per row

  static DYNEMB_HD void element(const OptimizerStep& s, float gradient, float& weight, float*) {
    weight -= s.lr * (gradient + s.weight_decay * weight);
  }
};

}  // namespace dynemb
