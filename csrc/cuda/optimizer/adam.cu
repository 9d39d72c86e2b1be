#include "core/optimizer/adam.h"
#include "cuda/optimizer/row_update.cuh"

DYNEMB_OPTIMIZER_OPS(adam, Adam)
