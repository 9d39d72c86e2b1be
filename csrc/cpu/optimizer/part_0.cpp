#include "cpu/optimizer/row_update.h"

template dynemb::cpu::OptimizerKernels dynemb::cpu::kernels_of_part<0>(int64_t optimizer);
