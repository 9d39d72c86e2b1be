// AMSGrad (Reddi, Kale, Kumar 2018): Adam that divides by the root of the largest second moment so
// far, as torch.optim.Adam(amsgrad=True).
#pragma once

#include "core/optimizer/adam.h"

namespace dynemb {

struct AmsGrad : AdamBase {
  static constexpr int kElementStates = 3;
  static constexpr unsigned kUnsignedStates = 6;

  template <class Values>
  static DYNEMB_HD void element(const OptimizerStep& s, const RowNumbers&, Values gradient,
                                Values& weight, Values* state) {
    const Values g = decayed_gradient(s, gradient, weight);
    const Values m = first_moment(s, g, state);
    const Values v = second_moment(s, g, state);
    const Values largest = v > state[2] ? v : state[2];
    state[0] = m;
    state[1] = v;
    state[2] = largest;
    weight = decayed_weight(s, weight) -
             s.step_size * (m / (square_root(largest) * s.root_correction2 + s.eps));
  }
};

}  // namespace dynemb
