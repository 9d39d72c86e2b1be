#include "cpu/optimizer/row_update.h"

template dynemb::cpu::OptimizerKernels dynemb::cpu::kernels_of_part<3>(int64_t optimizer);
