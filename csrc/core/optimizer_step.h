// What the optimizers share: the scalars of one table at one step.
#pragma once

#include <cmath>

#include "core/columns.h"
#include "core/host_device.h"

namespace dynemb {

struct OptimizerStep {
  float lr;
  float weight_decay;
  float eps;
  float beta1;
  float beta2;
  float initial_state;
  float step_size;         // lr / (1 - beta1^step)
  float root_correction2;  // 1 / sqrt(1 - beta2^step)
};

// `step` counts from 1. Powers are taken in double precision: beta2^step near 1 loses digits in
// single precision.
inline OptimizerStep optimizer_step(const double* hyper, int64_t step) {
  OptimizerStep s;
  s.lr = static_cast<float>(hyper[kHyperLr]);
  s.weight_decay = static_cast<float>(hyper[kHyperWeightDecay]);
  s.eps = static_cast<float>(hyper[kHyperEps]);
  s.beta1 = static_cast<float>(hyper[kHyperBeta1]);
  s.beta2 = static_cast<float>(hyper[kHyperBeta2]);
  s.initial_state = static_cast<float>(hyper[kHyperInitialState]);
  const double t = static_cast<double>(step);
  s.step_size = static_cast<float>(hyper[kHyperLr] / (1.0 - std::pow(hyper[kHyperBeta1], t)));
  s.root_correction2 = static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(hyper[kHyperBeta2], t)));
  return s;
}

}  // namespace dynemb
