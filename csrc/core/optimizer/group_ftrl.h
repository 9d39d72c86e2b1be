// FTRL with a group penalty: a row becomes zero as a whole if its shrunk linear term is short (Ni
// et al. 2021, "Adaptive optimizers with sparse group lasso for neural networks in CTR
// prediction").
#pragma once

#include "core/optimizer/ftrl.h"

namespace dynemb {

struct GroupFtrl : Ftrl {
  static constexpr int kSums = 1;
  static constexpr bool kSumsWeights = true;

  template <class Values>
  static DYNEMB_HD void add_terms(const OptimizerStep& s, Values gradient, Values weight,
                                  const Values* state, Values* sums) {
    const Values z = linear(s, decayed_gradient(s, gradient, weight), weight, state);
    const Values left = shrunk(s, z);
    sums[0] += left * left;
  }
  static DYNEMB_HD RowNumbers row(const OptimizerStep& s, const float* sums, float dim, float*) {
    const float norm = sqrtf(sums[0]);
    const float least = s.group * sqrtf(dim);
    return {norm <= least ? 0.0f : 1.0f - least / norm, 0.0f};
  }
  template <class Values>
  static DYNEMB_HD void element(const OptimizerStep& s, const RowNumbers& row, Values gradient,
                                Values& weight, Values* state) {
    const Values g = decayed_gradient(s, gradient, weight);
    const Values z = linear(s, g, weight, state);
    const Values sum = state[0] + g * g;
    state[0] = sum;
    state[1] = z;
    weight = decayed_weight(s, rate(s, sum) * row.first * shrunk(s, z));
  }
};

}  // namespace dynemb
