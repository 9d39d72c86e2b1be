// Adam with epsilon outside of the bias correction, the "epsilon hat" of Kingma and Ba (2015,
// section 2) that TensorFlow's Adam uses.
#pragma once

#include "core/optimizer/adam.h"

namespace dynemb {

struct AdamWTf : AdamBase {
  template <class Values>
  static DYNEMB_HD void element(const OptimizerStep& s, const RowNumbers&, Values gradient,
                                Values& weight, Values* state) {
    const Values g = decayed_gradient(s, gradient, weight);
    const Values m = first_moment(s, g, state);
    const Values v = second_moment(s, g, state);
    state[0] = m;
    state[1] = v;
    weight = decayed_weight(s, weight) - s.hat_step_size * (m / (square_root(v) + s.eps));
  }
};

}  // namespace dynemb
