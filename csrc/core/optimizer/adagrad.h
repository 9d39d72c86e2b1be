// Adagrad (Duchi, Hazan, Singer 2011) with L2 weight decay, as torch.optim.Adagrad without
// lr_decay.
#pragma once

#include "core/optimizer_step.h"

namespace dynemb {

struct Adagrad {
  static constexpr int kElementStates = 1;
  static constexpr int kRowStates = 0;

  static DYNEMB_HD void element(const OptimizerStep& s, float gradient, float& weight,
                                float* state) {
    const float g = gradient + s.weight_decay * weight;
    const float sum = state[0] + g * g;
    state[0] = sum;
    weight -= s.lr * (g / (sqrtf(sum) + s.eps));
  }
};

}  // namespace dynemb
