// Macros for functions that the CPU kernels and the CUDA kernels share.
//
// On the host they are forced inline: the CPU kernels compile each leaf function for several SIMD
// levels (cpu/runtime/simd.h), and only inlined code takes the caller's instruction set.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define DYNEMB_HD __host__ __device__ __forceinline__
#if defined(__CUDA_ARCH__)
#define DYNEMB_UNROLL(times) _Pragma("unroll")
#else
#define DYNEMB_UNROLL(times)
#endif
#else
#define DYNEMB_HD inline __attribute__((always_inline))
#define DYNEMB_STRING(text) #text
#define DYNEMB_UNROLL(times) _Pragma(DYNEMB_STRING(GCC unroll times))
#endif
