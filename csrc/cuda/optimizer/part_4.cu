#include "cuda/optimizer/ops.cuh"

DYNEMB_IMPLEMENT_OPS(m) { dynemb::cuda::implement_optimizers<4>(m); }
