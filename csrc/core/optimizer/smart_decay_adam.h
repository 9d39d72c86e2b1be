// Adam that makes up for the steps in which a row was not touched. Its moments decay over all of
// them, and the weight moves by what the first moment would have given meanwhile (Caffe2's and
// OneFlow's smart_decay_sparse_adam). k: steps since the row's last update.
#pragma once

#include "core/optimizer/adam.h"

namespace dynemb {

struct SmartDecayAdam : AdamBase {
  static constexpr RowSteps kRowSteps = RowSteps::kLastSeen;

  static DYNEMB_HD void since(OptimizerStep& s, int32_t last) { decay_since(s, s.step - last); }
  template <class Values>
  static DYNEMB_HD void element(const OptimizerStep& s, const RowNumbers&, Values gradient,
                                Values& weight, Values* state) {
    const Values g = decayed_gradient(s, gradient, weight);
    const Values m = s.decay1 * state[0] + s.complement1 * g;
    const Values v = s.decay2 * state[1] + s.complement2 * g * g;
    const Values made_up = m + s.catchup * state[0];
    state[0] = m;
    state[1] = v;
    weight = decayed_weight(s, weight) -
             s.step_size * (made_up / (square_root(v) * s.root_correction2 + s.eps));
  }
};

}  // namespace dynemb
