// All optimizers. Their numbers, CPU kernels and CUDA kernels follow from this list.
#pragma once

#include <cstdint>
#include <iterator>

#include "core/optimizer/adadelta.h"
#include "core/optimizer/adagrad.h"
#include "core/optimizer/adam.h"
#include "core/optimizer/adamw_tf.h"
#include "core/optimizer/amsgrad.h"
#include "core/optimizer/ftrl.h"
#include "core/optimizer/group_ftrl.h"
#include "core/optimizer/lamb.h"
#include "core/optimizer/lars_sgd.h"
#include "core/optimizer/momentum_sgd.h"
#include "core/optimizer/partial_rowwise_adam.h"
#include "core/optimizer/partial_rowwise_lamb.h"
#include "core/optimizer/rmsprop.h"
#include "core/optimizer/rowwise_adagrad.h"
#include "core/optimizer/rowwise_rmsprop.h"
#include "core/optimizer/sgd.h"
#include "core/optimizer/smart_decay_adam.h"

// X(name, struct).
#define DYNEMB_FOR_EACH_OPTIMIZER(X)          \
  X(sgd, Sgd)                                 \
  X(adagrad, Adagrad)                         \
  X(rowwise_adagrad, RowwiseAdagrad)          \
  X(adam, Adam)                               \
  X(adamw_tf, AdamWTf)                        \
  X(momentum_sgd, MomentumSgd)                \
  X(amsgrad, AmsGrad)                         \
  X(smart_decay_adam, SmartDecayAdam)         \
  X(partial_rowwise_adam, PartialRowwiseAdam) \
  X(lamb, Lamb)                               \
  X(partial_rowwise_lamb, PartialRowwiseLamb) \
  X(lars_sgd, LarsSgd)                        \
  X(ftrl, Ftrl)                               \
  X(group_ftrl, GroupFtrl)                    \
  X(rmsprop, Rmsprop)                         \
  X(rmsprop_momentum, RmspropMomentum)        \
  X(adadelta, Adadelta)                       \
  X(rowwise_rmsprop, RowwiseRmsprop)

namespace dynemb {

// The number of an optimizer is its position in the list. Ops take it, files do not contain it.
#define DYNEMB_NUMBER_OF(name, Optimizer) k##Optimizer,
enum class OptimizerNumber : int { DYNEMB_FOR_EACH_OPTIMIZER(DYNEMB_NUMBER_OF) };
#undef DYNEMB_NUMBER_OF

#define DYNEMB_NAME_OF(name, Optimizer) #name,
inline constexpr const char* kOptimizerNames[] = {DYNEMB_FOR_EACH_OPTIMIZER(DYNEMB_NAME_OF)};
#undef DYNEMB_NAME_OF
inline constexpr int64_t kOptimizers = std::size(kOptimizerNames);

// Calls f(number, Optimizer{}) for every kParts-th optimizer, from number kPart on; the others are
// not instantiated. The kernels of a device are in kParts sources, to be compiled in parallel.
template <int kPart, int kParts, class F>
constexpr void for_optimizers_of_part(const F& f) {
  static_assert(kPart >= 0 && kPart < kParts);
#define DYNEMB_CALL_IN_PART(name, Optimizer)                                         \
  if constexpr (static_cast<int>(OptimizerNumber::k##Optimizer) % kParts == kPart) { \
    f(static_cast<int64_t>(OptimizerNumber::k##Optimizer), Optimizer{});             \
  }
  DYNEMB_FOR_EACH_OPTIMIZER(DYNEMB_CALL_IN_PART)
#undef DYNEMB_CALL_IN_PART
}

}  // namespace dynemb
