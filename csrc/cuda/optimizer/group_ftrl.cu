#include "core/optimizer/group_ftrl.h"
#include "cuda/optimizer/row_update.cuh"

DYNEMB_OPTIMIZER_OPS(group_ftrl, GroupFtrl)
