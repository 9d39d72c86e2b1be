#include "core/optimizer/sgd.h"
#include "cuda/row_update.cuh"

DYNEMB_OPTIMIZER_OPS(sgd, Sgd)
