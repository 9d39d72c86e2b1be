// Running a kernel: one fiber for each thread of a block that has to wait, block after block.
#pragma once

#include <type_traits>

#include "emulator/types.h"

namespace emulator {

// Memory that nothing may read or write until it is freed; only AddressSanitizer knows.
#if defined(EMULATOR_BOUNDS)
void forbid(char* begin, char* end);
#else
inline void forbid(char*, char*) {}
#endif

// For tests: which of the faults in mutants.py the kernels have; 0: none.
extern int mutant;

void run_threads(dim3 grid, dim3 block, void (*body)(void*), void* context);

// Calls `thread_body` once for every thread, with threadIdx and the like set.
template <class F>
void run_kernel(dim3 grid, dim3 block, F&& thread_body) {
  using Body = std::remove_reference_t<F>;
  run_threads(
      grid, block, [](void* context) { (*static_cast<Body*>(context))(); },
      const_cast<void*>(static_cast<const void*>(&thread_body)));
}

}  // namespace emulator

// For tests, through ctypes.
extern "C" {
// Order of blocks, of ready threads, and of threads between atomic operations: ascending for 0,
// else shuffled.
__attribute__((visibility("default"))) void emulator_set_seed(unsigned long long seed);
__attribute__((visibility("default"))) void emulator_set_mutant(int number);
// A byte of which shared memory is full when a block begins.
__attribute__((visibility("default"))) void emulator_set_fill(int byte);
__attribute__((visibility("default"))) long long emulator_launches();
}
