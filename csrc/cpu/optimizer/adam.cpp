#include "core/optimizer/adam.h"

#include "core/optimizer/adamw_tf.h"
#include "core/optimizer/amsgrad.h"
#include "core/optimizer/smart_decay_adam.h"
#include "cpu/optimizer/row_update.h"

namespace dynemb::cpu {

template const OptimizerKernels& optimizer_kernels<Adam>();
template const OptimizerKernels& optimizer_kernels<AmsGrad>();
template const OptimizerKernels& optimizer_kernels<AdamWTf>();
template const OptimizerKernels& optimizer_kernels<SmartDecayAdam>();

}  // namespace dynemb::cpu
