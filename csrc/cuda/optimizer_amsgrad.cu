#include "core/optimizer/amsgrad.h"
#include "cuda/row_update.cuh"

DYNEMB_OPTIMIZER_OPS(amsgrad, AmsGrad)
