#include "core/optimizer/adamw_tf.h"
#include "cuda/optimizer/row_update.cuh"

DYNEMB_OPTIMIZER_OPS(adamw_tf, AdamWTf)
