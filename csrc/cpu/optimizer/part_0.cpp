#include "cpu/optimizer/ops.h"

STABLE_TORCH_LIBRARY_IMPL(dynemb, CPU, m) { dynemb::cpu::implement_optimizers<0>(m); }
