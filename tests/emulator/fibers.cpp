// Fibers switch with _setjmp and _longjmp, which make no system call; in sanitized builds with
// swapcontext, and sanitizers hear of each switch.
#include "emulator/fibers.h"

#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#if defined(EMULATOR_BOUNDS)
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(EMULATOR_RACES)
#include <sanitizer/tsan_interface.h>
#endif

namespace emulator {
namespace {

constexpr size_t kStackBytes = 64 * 1024;
Fiber* entered;

char* new_stack(size_t* bytes) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  *bytes = (kStackBytes + page - 1) / page * page;
  void* memory = mmap(nullptr, page + *bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED || mprotect(memory, page, PROT_NONE) != 0) {
    std::perror("emulator: no memory for the stack of a thread");
    std::abort();
  }
  return static_cast<char*>(memory) + page;
}

// A context at the begin of enter_fiber, on a new stack.
template <class Enter>
void make_context(ucontext_t& context, Enter enter, Fiber* fiber) {
  size_t bytes;
  char* stack = new_stack(&bytes);
  getcontext(&context);
  context.uc_stack.ss_sp = stack;
  context.uc_stack.ss_size = bytes;
  context.uc_link = nullptr;
#if defined(EMULATOR_SANITIZED)
  fiber->stack = stack;
  fiber->stack_bytes = bytes;
#else
  static_cast<void>(fiber);
#endif
  makecontext(&context, enter, 0);
}

#if defined(EMULATOR_SANITIZED)
Fiber* left;  // by the last switch

void announce_arrival(Fiber& fiber) {
#if defined(EMULATOR_BOUNDS)
  const void* stack;
  size_t bytes;
  __sanitizer_finish_switch_fiber(fiber.unseen, &stack, &bytes);
  left->stack = stack;
  left->stack_bytes = bytes;
#else
  static_cast<void>(fiber);
#endif
}
void enter_fiber() {
  Fiber* self = entered;
  self->registers.uc_stack = {};  // AddressSanitizer would clear its data of the stack
  announce_arrival(*self);
  self->main(self);
}
#else
ucontext_t creator;

void enter_fiber() {
  Fiber* self = entered;
  if (_setjmp(self->registers) == 0) setcontext(&creator);
  self->main(self);
}
#endif

}  // namespace

Fiber* create_fiber(void (*main)(Fiber*)) {
  auto* fiber = new Fiber();
  fiber->main = main;
#if defined(EMULATOR_SANITIZED)
  make_context(fiber->registers, enter_fiber, fiber);
#if defined(EMULATOR_RACES)
  fiber->racer = __tsan_create_fiber(0);
#endif
#else
  ucontext_t context;
  make_context(context, enter_fiber, fiber);
  entered = fiber;
  swapcontext(&creator, &context);
#endif
  return fiber;
}

void adopt_thread(Fiber& fiber) {
#if defined(EMULATOR_RACES)
  fiber.racer = __tsan_get_current_fiber();
#else
  static_cast<void>(fiber);
#endif
}

__attribute__((noinline)) void switch_fiber(Fiber& from, Fiber& to) {
#if defined(EMULATOR_SANITIZED)
  left = &from;
  entered = &to;
#if defined(EMULATOR_BOUNDS)
  __sanitizer_start_switch_fiber(&from.unseen, to.stack, to.stack_bytes);
#else
  __tsan_switch_to_fiber(to.racer, __tsan_switch_to_fiber_no_sync);
#endif
  swapcontext(&from.registers, &to.registers);
  announce_arrival(from);
#else
  if (_setjmp(from.registers) == 0) _longjmp(to.registers, 1);
#endif
}

}  // namespace emulator
