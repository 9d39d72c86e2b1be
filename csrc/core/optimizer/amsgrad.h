// AMSGrad (Reddi, Kale, Kumar 2018): Adam that divides by the root of the largest second moment so
// far, as torch.optim.Adam(amsgrad=True).
#pragma once

#include "core/optimizer_step.h"

namespace dynemb {

struct AmsGrad {
  static constexpr int kElementStates = 3;
  static constexpr int kRowStates = 0;

  static DYNEMB_HD void element(const OptimizerStep& s, float gradient, float& weight,
                                float* state) {
    const float g = gradient + s.weight_decay * weight;
    const float m = s.beta1 * state[0] + s.complement1 * g;
    const float v = s.beta2 * state[1] + s.complement2 * g * g;
    const float largest = v > state[2] ? v : state[2];
    state[0] = m;
    state[1] = v;
    state[2] = largest;
    weight -= s.step_size * (m / (sqrtf(largest) * s.root_correction2 + s.eps));
  }
};

}  // namespace dynemb
