#include "core/optimizer/lamb.h"
#include "cuda/optimizer/row_update.cuh"

DYNEMB_OPTIMIZER_OPS(lamb, Lamb)
