// All optimizers. Schemas, CPU kernels and CUDA kernels follow from this list.
#pragma once

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
#include "core/optimizer/rowwise_adagrad.h"
#include "core/optimizer/sgd.h"
#include "core/optimizer/smart_decay_adam.h"

// X(name in op names, struct).
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
  X(group_ftrl, GroupFtrl)

namespace dynemb {

// The ops of one optimizer: kUpdate applies the result of reduce_grad, kBackward reduces and
// applies in one pass.
template <class Optimizer>
struct OptimizerOps;

#define DYNEMB_NUMBER_OF(name, Optimizer) k##Optimizer,
enum class OptimizerNumber : int { DYNEMB_FOR_EACH_OPTIMIZER(DYNEMB_NUMBER_OF) };
#undef DYNEMB_NUMBER_OF

#define DYNEMB_OPS_OF(name, OptimizerStruct)                                              \
  template <>                                                                             \
  struct OptimizerOps<OptimizerStruct> {                                                  \
    using Optimizer = OptimizerStruct;                                                    \
    static constexpr int kNumber = static_cast<int>(OptimizerNumber::k##OptimizerStruct); \
    static constexpr const char* kUpdate = #name "_update_";                              \
    static constexpr const char* kBackward = #name "_backward_";                          \
  };
DYNEMB_FOR_EACH_OPTIMIZER(DYNEMB_OPS_OF)
#undef DYNEMB_OPS_OF

// Calls f(OptimizerOps) for every kParts-th optimizer, from number kPart on; the others are not
// instantiated. The kernels of a device are in kParts sources, to be compiled in parallel.
template <int kPart, int kParts, class F>
void for_optimizers_of_part(const F& f) {
  static_assert(kPart >= 0 && kPart < kParts);
#define DYNEMB_CALL_IN_PART(name, Optimizer)                          \
  if constexpr (OptimizerOps<Optimizer>::kNumber % kParts == kPart) { \
    f(OptimizerOps<Optimizer>{});                                     \
  }
  DYNEMB_FOR_EACH_OPTIMIZER(DYNEMB_CALL_IN_PART)
#undef DYNEMB_CALL_IN_PART
}

}  // namespace dynemb
