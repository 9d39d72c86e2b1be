#include "core/optimizer/lamb.h"

#include "core/optimizer/partial_rowwise_adam.h"
#include "core/optimizer/partial_rowwise_lamb.h"
#include "cpu/optimizer/row_update.h"

namespace dynemb::cpu {

template const OptimizerKernels& optimizer_kernels<PartialRowwiseAdam>();
template const OptimizerKernels& optimizer_kernels<Lamb>();
template const OptimizerKernels& optimizer_kernels<PartialRowwiseLamb>();

}  // namespace dynemb::cpu
