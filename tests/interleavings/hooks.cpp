// The calls that the compiler adds to programs, and functions of the system that threads wait in.
#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>

#include <ctime>

#include "memory.h"

using namespace interleavings;

#define CALLER __builtin_return_address(0)
extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_acquire(void*) {}
void __tsan_read_range(void* memory, size_t bytes) { access_plain(memory, bytes, false, CALLER); }
void __tsan_write_range(void* memory, size_t bytes) { access_plain(memory, bytes, true, CALLER); }

#define PLAIN(bytes)                                                                              \
  void __tsan_read##bytes(void* memory) { access_plain(memory, bytes, false, CALLER); }           \
  void __tsan_write##bytes(void* memory) { access_plain(memory, bytes, true, CALLER); }           \
  void __tsan_unaligned_read##bytes(void* memory) { access_plain(memory, bytes, false, CALLER); } \
  void __tsan_unaligned_write##bytes(void* memory) { access_plain(memory, bytes, true, CALLER); }
PLAIN(1)
PLAIN(2)
PLAIN(4)
PLAIN(8)
PLAIN(16)

#define MODIFY(T, name, changed)                                  \
  T __tsan_atomic##name(T* memory, T value, int order) {          \
    return modify(memory, order, CALLER, [value](T before) -> T { \
      static_cast<void>(before);                                  \
      return static_cast<T>(changed);                             \
    });                                                           \
  }
#define ATOMIC(T, bits)                                                                         \
  T __tsan_atomic##bits##_load(T* memory, int order) { return load(memory, order, CALLER); }    \
  void __tsan_atomic##bits##_store(T* memory, T value, int order) {                             \
    store(memory, value, order, CALLER);                                                        \
  }                                                                                             \
  MODIFY(T, bits##_exchange, value)                                                             \
  MODIFY(T, bits##_fetch_add, before + value)                                                   \
  MODIFY(T, bits##_fetch_sub, before - value)                                                   \
  MODIFY(T, bits##_fetch_and, before& value)                                                    \
  MODIFY(T, bits##_fetch_or, before | value)                                                    \
  MODIFY(T, bits##_fetch_xor, before ^ value)                                                   \
  int __tsan_atomic##bits##_compare_exchange_strong(T* memory, T* expected, T value, int order, \
                                                    int failure) {                              \
    return compare_exchange(memory, expected, value, order, failure, false, CALLER);            \
  }                                                                                             \
  int __tsan_atomic##bits##_compare_exchange_weak(T* memory, T* expected, T value, int order,   \
                                                  int failure) {                                \
    return compare_exchange(memory, expected, value, order, failure, true, CALLER);             \
  }
ATOMIC(uint8_t, 8)
ATOMIC(uint16_t, 16)
ATOMIC(uint32_t, 32)
ATOMIC(uint64_t, 64)
void __tsan_atomic_thread_fence(int order) { fence(order, CALLER); }
void __tsan_atomic_signal_fence(int) {}

// The linker puts these in the places of the functions after __wrap_.
void* __wrap_memcpy(void* to, const void* from, size_t bytes) {
  return copy(static_cast<char*>(to), static_cast<const char*>(from), bytes, CALLER);
}
int __wrap_sched_yield() {
  if (is_running()) schedule(Reason::kYield);
  return 0;
}
int __wrap_nanosleep(const timespec*, timespec*) { return __wrap_sched_yield(); }
pthread_t __wrap_pthread_self() { return static_cast<pthread_t>(current + 2); }

int __wrap_pthread_mutex_lock(pthread_mutex_t* mutex) {
  if (is_running()) lock(mutex, CALLER);
  return 0;
}
int __wrap_pthread_mutex_unlock(pthread_mutex_t* mutex) {
  if (is_running()) unlock(mutex, CALLER);
  return 0;
}

// std::atomic<int>::wait and notify_all
long __wrap_syscall(long number, void* address, long operation, int value, ...) {
  if (number != SYS_futex) fail("a system call that is not modelled");
  if (!is_running()) return 0;
  schedule(Reason::kStep);
  const bool waits = (operation & FUTEX_CMD_MASK) == FUTEX_WAIT;
  note(waits ? "futex wait" : "futex wake", address, static_cast<uint64_t>(value), CALLER);
  if (!waits) {
    wake(address);
  } else if (*static_cast<int*>(address) == value) {
    wait_for(address);
  }
  return 0;
}
}
