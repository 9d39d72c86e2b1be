// Adam (Kingma, Ba 2015) with L2 weight decay, epsilon outside the corrected root as in
// torch.optim.Adam, touched rows only and bias correction by the table's step as in
// torch.optim.SparseAdam.
#pragma once

#include "core/optimizer_step.h"

namespace dynemb {

// Updates the moments and returns the step to subtract.
DYNEMB_HD float adam_step(const OptimizerStep& s, float g, float* state) {
  const float m = s.beta1 * state[0] + s.complement1 * g;
  const float v = s.beta2 * state[1] + s.complement2 * g * g;
  state[0] = m;
  state[1] = v;
  return s.step_size * (m / (sqrtf(v) * s.root_correction2 + s.eps));
}

struct Adam {
  static constexpr int kElementStates = 2;
  static constexpr int kRowStates = 0;

  static DYNEMB_HD void element(const OptimizerStep& s, float gradient, float& weight,
                                float* state) {
    weight -= adam_step(s, gradient + s.weight_decay * weight, state);
  }
};

}  // namespace dynemb
