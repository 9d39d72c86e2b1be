// Stands in for CUDA's header of the same name when g++ compiles kernels for the emulator.
#pragma once

#include "emulator/atomics.h"
#include "emulator/intrinsics.h"
#include "emulator/runtime_api.h"
#include "emulator/streams.h"
#include "emulator/synchronization.h"
#include "emulator/types.h"
