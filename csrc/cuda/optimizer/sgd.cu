#include "core/optimizer/sgd.h"
#include "cuda/optimizer/row_update.cuh"

DYNEMB_OPTIMIZER_OPS(sgd, Sgd)
