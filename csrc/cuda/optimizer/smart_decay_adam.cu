#include "core/optimizer/smart_decay_adam.h"
#include "cuda/optimizer/row_update.cuh"

DYNEMB_OPTIMIZER_OPS(smart_decay_adam, SmartDecayAdam)
