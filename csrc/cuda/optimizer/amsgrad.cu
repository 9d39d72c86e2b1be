#include "core/optimizer/amsgrad.h"
#include "cuda/optimizer/row_update.cuh"

DYNEMB_OPTIMIZER_OPS(amsgrad, AmsGrad)
