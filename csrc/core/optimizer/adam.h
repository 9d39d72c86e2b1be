// Adam (Kingma, Ba 2015), epsilon outside the corrected root as in torch.optim.Adam, touched rows
// only and bias correction by the table's step as in torch.optim.SparseAdam, or by the row's. With
// decoupled weight decay it is AdamW (Loshchilov, Hutter 2019).
#pragma once

#include "core/optimizer/step.h"

namespace dynemb {

struct AdamBase : ByElement {
  static constexpr int kElementStates = 2;
  static constexpr unsigned kUnsignedStates = 2;
  static constexpr RowSteps kRowSteps = RowSteps::kOptional;
};

// Moments of a gradient: the new values of state[0] and state[1].
template <class Values>
DYNEMB_HD Values first_moment(const OptimizerStep& s, Values g, const Values* state) {
  return s.beta1 * state[0] + s.complement1 * g;
}
template <class Values>
DYNEMB_HD Values second_moment(const OptimizerStep& s, Values g, const Values* state) {
  return s.beta2 * state[1] + s.complement2 * g * g;
}

struct Adam : AdamBase {
  template <class Values>
  static DYNEMB_HD void element(const OptimizerStep& s, const RowNumbers&, Values gradient,
                                Values& weight, Values* state) {
    const Values g = decayed_gradient(s, gradient, weight);
    const Values m = first_moment(s, g, state);
    const Values v = second_moment(s, g, state);
    state[0] = m;
    state[1] = v;
    weight = decayed_weight(s, weight) -
             s.step_size * (m / (square_root(v) * s.root_correction2 + s.eps));
  }
};

}  // namespace dynemb
