#include "core/optimizer/momentum_sgd.h"
#include "cuda/optimizer/row_update.cuh"

DYNEMB_OPTIMIZER_OPS(momentum_sgd, MomentumSgd)
