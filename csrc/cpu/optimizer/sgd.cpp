#include "core/optimizer/sgd.h"

#include "core/optimizer/lars_sgd.h"
#include "core/optimizer/momentum_sgd.h"
#include "cpu/optimizer/row_update.h"

namespace dynemb::cpu {

template const OptimizerKernels& optimizer_kernels<Sgd>();
template const OptimizerKernels& optimizer_kernels<MomentumSgd>();
template const OptimizerKernels& optimizer_kernels<LarsSgd>();

}  // namespace dynemb::cpu
