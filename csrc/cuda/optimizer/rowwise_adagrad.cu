#include "core/optimizer/rowwise_adagrad.h"
#include "cuda/optimizer/row_update.cuh"

DYNEMB_OPTIMIZER_OPS(rowwise_adagrad, RowwiseAdagrad)
