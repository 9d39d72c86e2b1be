// AdamW with epsilon outside of the bias correction, the "epsilon hat" of Kingma and Ba (2015,
// section 2) that TensorFlow's Adam uses; decoupled weight decay of the touched rows.
#pragma once

#include "core/optimizer_step.h"

namespace dynemb {

struct AdamWTf {
  static constexpr int kElementStates = 2;
  static constexpr int kRowStates = 0;

  static DYNEMB_HD void element(const OptimizerStep& s, float gradient, float& weight,
                                float* state) {
    const float m = s.beta1 * state[0] + s.complement1 * gradient;
    const float v = s.beta2 * state[1] + s.complement2 * gradient * gradient;
    state[0] = m;
    state[1] = v;
    const float decayed = weight - s.lr * s.weight_decay * weight;
    weight = decayed - s.hat_step_size * (m / (sqrtf(v) + s.eps));
  }
};

}  // namespace dynemb
