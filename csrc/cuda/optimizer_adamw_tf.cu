#include "core/optimizer/adamw_tf.h"
#include "cuda/row_update.cuh"

DYNEMB_OPTIMIZER_OPS(adamw_tf, AdamWTf)
