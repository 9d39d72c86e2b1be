// AdamW (Loshchilov, Hutter 2019): Adam with decoupled weight decay of the touched rows.
#pragma once

#include "core/optimizer/adam.h"

namespace dynemb {

struct AdamW {
  static constexpr int kElementStates = 2;
  static constexpr int kRowStates = 0;

  static DYNEMB_HD void element(const OptimizerStep& s, float gradient, float& weight,
                                float* state) {
    const float decayed = weight - s.lr * s.weight_decay * weight;
    weight = decayed - adam_step(s, gradient, state);
  }
};

}  // namespace dynemb
