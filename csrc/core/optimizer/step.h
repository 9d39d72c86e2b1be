// Shared parts of optimizers: the scalars of one table at one step, and scaling and clipping of
// gradients.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/columns.h"
#include "core/host_device.h"

namespace dynemb {

#if !defined(__CUDACC__) && !defined(DYNEMB_EMULATED)
// Eight floats as one value, so that loops are vectorized by any compiler.
typedef float Floats8 __attribute__((vector_size(32)));
DYNEMB_HD Floats8 square_root(Floats8 values) {
  Floats8 roots;
  for (int i = 0; i < 8; ++i) roots[i] = sqrtf(values[i]);
  return roots;
}
// Sixteen, if the instruction set has registers for them.
typedef float Floats16 __attribute__((vector_size(64)));
DYNEMB_HD Floats16 square_root(Floats16 values) {
  Floats16 roots;
  for (int i = 0; i < 16; ++i) roots[i] = sqrtf(values[i]);
  return roots;
}
#endif
DYNEMB_HD float square_root(float value) { return sqrtf(value); }

// How an optimizer counts steps by row.
enum class RowSteps {
  kNone,
  kOptional,  // int32 [rows], updates of the row; used for bias correction if the tensor is there
  kLastSeen   // int32 [rows], step of the table at the row's last update; since() of the optimizer
              // adapts the step to it
};

// Steps of a row saturate at the range of int32.
DYNEMB_HD int32_t row_step(int64_t step) {
  return step < INT32_MAX ? static_cast<int32_t>(step) : INT32_MAX;
}

enum class NonFinite : int { kPropagate = 0, kSkip = 1, kRaise = 2 };
constexpr int kNonFiniteCount = 3;

struct OptimizerStep {
  double hyper_lr;
  double hyper_beta1;
  double hyper_beta2;
  double shrink_rate;  // RowwiseRmsprop: share by which a row shrinks per step
  int64_t step;
  float lr;
  float l2;         // weight decay that is added to the gradient
  float decoupled;  // decay that shrinks the weight, otherwise 0
  float weight_decay;
  float eps;
  float beta1;
  float beta2;
  float complement1;  // 1 - beta1
  float complement2;  // 1 - beta2
  float initial_state;
  float step_size;         // lr / (1 - beta1^step)
  float root_correction1;  // 1 / (1 - beta1^step)
  float root_correction2;  // 1 / sqrt(1 - beta2^step)
  float hat_step_size;     // lr * sqrt(1 - beta2^step) / (1 - beta1^step)
  float momentum;
  float nesterov;
  float l1;
  float ridge;  // L2 penalty of FTRL
  float group;  // group penalty of Group-FTRL, times sqrt(dim) of the row
  float trust;
  float beta;
  float decay1;         // SmartDecayAdam: beta1^k, of a row that was last updated k steps ago
  float decay2;         // beta2^k
  float catchup;        // beta1 + ... + beta1^(k - 1)
  float min_shrinkage;  // RowwiseRmsprop: least factor of a row
  float shrinkage;      // factor of a row
  float gradient_scale;
  float clip_value;
  float clip_norm;
  NonFinite non_finite;
  bool scales;      // gradients are scaled or clipped by value
  bool measures;    // the whole gradient of a row is needed: clip_norm, or NaN
  bool stochastic;  // rows and state below float32 are rounded stochastically
  bool skip;        // the table is not updated
};

// Bias corrections at a step that counts from 1. The subtrahend of 1 stays in double precision: 1 -
// 0.999f is off by 1.3e-5 of its value.
DYNEMB_HD void correct_bias(OptimizerStep& s, int64_t step) {
  const double t = static_cast<double>(step);
  const double correction1 = 1.0 - pow(s.hyper_beta1, t);
  const double root = sqrt(1.0 - pow(s.hyper_beta2, t));
  const double step_size = s.hyper_lr / correction1;
  s.step_size = static_cast<float>(step_size);
  s.root_correction1 = static_cast<float>(1.0 / correction1);
  s.root_correction2 = static_cast<float>(1.0 / root);
  s.hat_step_size = static_cast<float>(step_size * root);
}

// Decay over the `k` >= 1 steps since a row was last updated, this one included.
DYNEMB_HD void decay_since(OptimizerStep& s, int64_t k) {
  const double skipped = static_cast<double>(k - 1);
  const double beta1 = s.hyper_beta1;
  const double left = pow(beta1, skipped);
  s.decay1 = static_cast<float>(left * beta1);
  s.decay2 = static_cast<float>(pow(s.hyper_beta2, static_cast<double>(k)));
  s.catchup = static_cast<float>(beta1 * (1.0 - left) / (1.0 - beta1));
}

// Limit of gradients; infinity: none.
DYNEMB_HD float clip_limit(double limit) {
  return limit > 0.0 ? static_cast<float>(limit) : 3.402823466e38f * 10.0f;
}
// From any number; unknown values mean that NaN propagates.
DYNEMB_HD NonFinite non_finite_of(double number) {
  const bool known = number >= 0.0 && number < static_cast<double>(kNonFiniteCount);
  return known ? static_cast<NonFinite>(static_cast<int>(number)) : NonFinite::kPropagate;
}

// `step` counts from 1.
DYNEMB_HD OptimizerStep optimizer_step(const double* hyper, int64_t step) {
  OptimizerStep s;
  const double lr = hyper[kHyperLr] / (1.0 + static_cast<double>(step - 1) * hyper[kHyperLrDecay]);
  s.hyper_lr = lr;
  s.hyper_beta1 = hyper[kHyperBeta1];
  s.hyper_beta2 = hyper[kHyperBeta2];
  s.step = step;
  const bool decoupled = hyper[kHyperDecoupled] != 0.0;
  const double decay_rate = hyper[kHyperDecoupled] == kDecayByItself ? 1.0 : lr;
  s.lr = static_cast<float>(lr);
  s.weight_decay = static_cast<float>(hyper[kHyperWeightDecay]);
  s.l2 = decoupled ? 0.0f : s.weight_decay;
  s.decoupled = decoupled ? static_cast<float>(decay_rate * hyper[kHyperWeightDecay]) : 0.0f;
  s.eps = static_cast<float>(hyper[kHyperEps]);
  s.beta1 = static_cast<float>(hyper[kHyperBeta1]);
  s.beta2 = static_cast<float>(hyper[kHyperBeta2]);
  s.complement1 = static_cast<float>(1.0 - hyper[kHyperBeta1]);
  s.complement2 = static_cast<float>(1.0 - hyper[kHyperBeta2]);
  s.initial_state = static_cast<float>(hyper[kHyperInitialState]);
  s.momentum = static_cast<float>(hyper[kHyperMomentum]);
  s.nesterov = static_cast<float>(hyper[kHyperNesterov]);
  s.l1 = static_cast<float>(hyper[kHyperL1]);
  s.ridge = static_cast<float>(hyper[kHyperRidge]);
  s.group = static_cast<float>(hyper[kHyperGroup]);
  s.trust = static_cast<float>(hyper[kHyperTrust]);
  s.beta = static_cast<float>(hyper[kHyperBeta]);
  s.shrink_rate = lr * hyper[kHyperArAlpha];
  s.min_shrinkage = static_cast<float>(hyper[kHyperMinShrinkage]);
  s.shrinkage = 1.0f;
  // zeroed memory has limits and a scale of 0, which mean none
  const double down_scale = hyper[kHyperDownScaleBy] != 0.0 ? hyper[kHyperDownScaleBy] : 1.0;
  const double sign = hyper[kHyperMaximize] != 0.0 ? -1.0 : 1.0;
  s.gradient_scale = static_cast<float>(sign / down_scale);
  s.clip_value = clip_limit(hyper[kHyperClipValue]);
  s.clip_norm = clip_limit(hyper[kHyperClipNorm]);
  s.non_finite = non_finite_of(hyper[kHyperNonFinite]);
  s.scales = s.gradient_scale != 1.0f || s.clip_value <= 3.4028234e38f;
  s.measures = s.clip_norm <= 3.4028234e38f || s.non_finite != NonFinite::kPropagate;
  s.stochastic = hyper[kHyperStochastic] != 0.0;
  s.skip = hyper[kHyperSkipIf] != 0.0;
  correct_bias(s, step);
  decay_since(s, 1);
  return s;
}

// A reduced gradient, scaled and clipped for the optimizer; NaN stays NaN.
DYNEMB_HD float scaled_gradient(const OptimizerStep& s, float gradient) {
  const float g = gradient * s.gradient_scale;
  return g > s.clip_value ? s.clip_value : (g < -s.clip_value ? -s.clip_value : g);
}
// Factor of a row's gradient, from the sum of squares of scaled_gradient.
DYNEMB_HD float norm_factor(const OptimizerStep& s, float squares) {
  const float norm = sqrtf(squares);
  return norm > s.clip_norm ? s.clip_norm / norm : 1.0f;
}

// Values: float, or several floats as one value.
template <class Values>
DYNEMB_HD Values decayed_gradient(const OptimizerStep& s, Values gradient, Values weight) {
  return gradient + s.l2 * weight;
}
template <class Values>
DYNEMB_HD Values decayed_weight(const OptimizerStep& s, Values weight) {
  return weight - s.decoupled * weight;
}

// Values that an optimizer computes once for a row.
struct RowNumbers {
  float first;
  float second;
};

// Row values of most optimizers: none.
struct ByElement {
  static constexpr int kRowStates = 0;            // state tensors with one value per row
  static constexpr int kSums = 0;                 // sums over the row's columns
  static constexpr bool kSumsWeights = false;     // whether weights and states are in them
  static constexpr unsigned kUnsignedStates = 0;  // bit k: state k is never negative
  static constexpr RowSteps kRowSteps = RowSteps::kNone;

  template <class Values>
  static DYNEMB_HD void add_terms(const OptimizerStep&, Values, Values, const Values*, Values*) {}
  static DYNEMB_HD RowNumbers row(const OptimizerStep&, const float*, float, float*) {
    return {0.0f, 0.0f};
  }
};

}  // namespace dynemb
