// Row-wise Adagrad: one accumulator per row, fed with the mean of the squared gradients of the row
// (Gupta, Bennett, Weston 2014; FBGEMM's exact_rowwise_adagrad), with L2 weight decay.
#pragma once

#include "core/optimizer_step.h"

namespace dynemb {

struct RowwiseAdagrad {
  static constexpr int kElementStates = 0;
  static constexpr int kRowStates = 1;

  // Values: float, or several floats as one value.
  template <class Values>
  static DYNEMB_HD Values effective_gradient(const OptimizerStep& s, Values gradient,
                                             Values weight) {
    return gradient + s.weight_decay * weight;
  }
  // Updates the row's accumulator and returns what multiplies the effective gradient.
  static DYNEMB_HD float row_scale(const OptimizerStep& s, float mean_square, float* row_state) {
    const float sum = row_state[0] + mean_square;
    row_state[0] = sum;
    return s.lr / (sqrtf(sum) + s.eps);
  }
};

}  // namespace dynemb
