// What the host side of a .cu file calls of the CUDA runtime and the emulator's headers lack,
// because the emulator does it in another way: declarations, for a check of the syntax
// (oldest_torch.py).
#pragma once

#include <cuda_runtime.h>

cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** arguments,
                             size_t shared_bytes, cudaStream_t stream);
cudaError_t cudaSetDevice(int device);
