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
  float complement1;  // 1 - beta1
  float complement2;  // 1 - beta2
  float initial_state;
  float step_size;         // lr / (1 - beta1^step)
  float root_correction2;  // 1 / sqrt(1 - beta2^step)
  float hat_step_size;     // lr * sqrt(1 - beta2^step) / (1 - beta1^step)
  float momentum;
  float nesterov;
};

// `step` counts from 1. What is subtracted from 1 stays in double precision: 1 - 0.999f is off by
// 1.3e-5 of its value.
DYNEMB_HD OptimizerStep optimizer_step(const double* hyper, int64_t step) {
  OptimizerStep s;
  s.lr = static_cast<float>(hyper[kHyperLr]);
  s.weight_decay = static_cast<float>(hyper[kHyperWeightDecay]);
  s.eps = static_cast<float>(hyper[kHyperEps]);
  s.beta1 = static_cast<float>(hyper[kHyperBeta1]);
  s.beta2 = static_cast<float>(hyper[kHyperBeta2]);
  s.complement1 = static_cast<float>(1.0 - hyper[kHyperBeta1]);
  s.complement2 = static_cast<float>(1.0 - hyper[kHyperBeta2]);
  s.initial_state = static_cast<float>(hyper[kHyperInitialState]);
  const double t = static_cast<double>(step);
  const double step_size = hyper[kHyperLr] / (1.0 - pow(hyper[kHyperBeta1], t));
  const double root = sqrt(1.0 - pow(hyper[kHyperBeta2], t));
  s.step_size = static_cast<float>(step_size);
  s.root_correction2 = static_cast<float>(1.0 / root);
  s.hat_step_size = static_cast<float>(step_size * root);
  s.momentum = static_cast<float>(hyper[kHyperMomentum]);
  s.nesterov = static_cast<float>(hyper[kHyperNesterov]);
  return s;
}

}  // namespace dynemb
