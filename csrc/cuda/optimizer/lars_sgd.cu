#include "core/optimizer/lars_sgd.h"
#include "cuda/optimizer/row_update.cuh"

DYNEMB_OPTIMIZER_OPS(lars_sgd, LarsSgd)
