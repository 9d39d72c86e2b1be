#include "core/optimizer/adagrad.h"
#include "cuda/optimizer/row_update.cuh"

DYNEMB_OPTIMIZER_OPS(adagrad, Adagrad)
