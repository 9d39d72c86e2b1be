// Stacks that one host thread runs in turn.
#pragma once

#include <cstddef>

#if defined(EMULATOR_RACES) || defined(EMULATOR_BOUNDS)
#define EMULATOR_SANITIZED
#include <ucontext.h>
#else
#include <setjmp.h>
#endif

namespace emulator {

// A stack, and where it goes on; the host thread's own one is also such.
struct Fiber {
#if defined(EMULATOR_SANITIZED)
  ucontext_t registers;  // sanitizers refuse longjmp from one stack to another
  const void* stack;
  size_t stack_bytes;
  void* unseen;  // AddressSanitizer's data of the stack while another one runs
  void* racer;   // ThreadSanitizer's thread
#else
  jmp_buf registers;
#endif
  void (*main)(Fiber*);
  int thread;  // to run next, or running
};

// `main` never returns.
Fiber* create_fiber(void (*main)(Fiber*));
// Makes `fiber` that of the calling host thread.
void adopt_thread(Fiber& fiber);
// Goes on with another fiber; returns when one switches back to `from`.
void switch_fiber(Fiber& from, Fiber& to);

}  // namespace emulator
