#include "core/optimizer/adagrad.h"

#include "core/optimizer/ftrl.h"
#include "core/optimizer/group_ftrl.h"
#include "core/optimizer/rowwise_adagrad.h"
#include "cpu/optimizer/row_update.h"

namespace dynemb::cpu {

template const OptimizerKernels& optimizer_kernels<Adagrad>();
template const OptimizerKernels& optimizer_kernels<RowwiseAdagrad>();
template const OptimizerKernels& optimizer_kernels<Ftrl>();
template const OptimizerKernels& optimizer_kernels<GroupFtrl>();

}  // namespace dynemb::cpu
