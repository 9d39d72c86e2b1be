#include "core/optimizer/partial_rowwise_lamb.h"
#include "cuda/optimizer/row_update.cuh"

DYNEMB_OPTIMIZER_OPS(partial_rowwise_lamb, PartialRowwiseLamb)
