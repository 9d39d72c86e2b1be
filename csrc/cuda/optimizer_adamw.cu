#include "core/optimizer/adamw.h"
#include "cuda/row_update.cuh"

DYNEMB_OPTIMIZER_OPS(adamw, AdamW)
