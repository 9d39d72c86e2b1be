#include "core/optimizer/ftrl.h"
#include "cuda/optimizer/row_update.cuh"

DYNEMB_OPTIMIZER_OPS(ftrl, Ftrl)
