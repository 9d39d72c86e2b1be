// The namespace of the ops. Tests build the CUDA sources a second time for an emulator on the CPU,
// under a namespace of their own.
#pragma once

#include <torch/csrc/stable/library.h>

#if !defined(DYNEMB_LIBRARY)
#define DYNEMB_LIBRARY dynemb
#endif

#define DYNEMB_DEFINE_IN(library, m) STABLE_TORCH_LIBRARY(library, m)
#define DYNEMB_DEFINE_OPS(m) DYNEMB_DEFINE_IN(DYNEMB_LIBRARY, m)
