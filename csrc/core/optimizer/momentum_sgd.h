// Stochastic gradient descent with momentum, plain (Polyak 1964) or Nesterov's in the form of
// Sutskever et al. 2013, with L2 weight decay: torch.optim.SGD without dampening.
#pragma once

#include "core/optimizer_step.h"

namespace dynemb {

struct MomentumSgd {
  static constexpr int kElementStates = 1;
  static constexpr int kRowStates = 0;

  static DYNEMB_HD void element(const OptimizerStep& s, float gradient, float& weight,
                                float* state) {
    const float g = gradient + s.weight_decay * weight;
    const float velocity = s.momentum * state[0] + g;
    state[0] = velocity;
    const float ahead = g + s.momentum * velocity;
    weight -= s.lr * (s.nesterov != 0.0f ? ahead : velocity);
  }
};

}  // namespace dynemb
