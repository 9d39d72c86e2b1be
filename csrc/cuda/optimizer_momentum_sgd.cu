#include "core/optimizer/momentum_sgd.h"
#include "cuda/row_update.cuh"

DYNEMB_OPTIMIZER_OPS(momentum_sgd, MomentumSgd)
