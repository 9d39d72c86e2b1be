// Atomic operations, for the types for which CUDA has them; long is none of them. Threads run one
// at a time, so plain reads and writes do; only ThreadSanitizer needs to know.
#pragma once

#include "emulator/order.h"
#include "emulator/synchronization.h"

namespace emulator {

template <class T, class Change>
T update(T* address, Change change) {
  interleave();
#if defined(EMULATOR_RACES)
  T old;
  T changed;
  __atomic_load(address, &old, __ATOMIC_RELAXED);
  order_before_write(address);
  do {
    changed = change(old);
  } while (!__atomic_compare_exchange(address, &old, &changed, false, __ATOMIC_RELAXED,
                                      __ATOMIC_RELAXED));
  order_after_read(address);
#else
  const T old = *address;
  *address = change(old);
#endif
  return old;
}

}  // namespace emulator

#define EMULATOR_ATOMIC(name, T, expression)                                      \
  inline T name(T* address, T value) {                                            \
    return emulator::update(address, [value](T old) -> T { return expression; }); \
  }
#define EMULATOR_ATOMIC_INTEGERS(T)                                                         \
  EMULATOR_ATOMIC(atomicAdd, T, old + value)                                                \
  EMULATOR_ATOMIC(atomicMin, T, value < old ? value : old)                                  \
  EMULATOR_ATOMIC(atomicMax, T, old < value ? value : old)                                  \
  EMULATOR_ATOMIC(atomicExch, T, (static_cast<void>(old), value))                           \
  EMULATOR_ATOMIC(atomicAnd, T, old& value)                                                 \
  EMULATOR_ATOMIC(atomicOr, T, old | value)                                                 \
  EMULATOR_ATOMIC(atomicXor, T, old ^ value)                                                \
  inline T atomicCAS(T* address, T expected, T value) {                                     \
    return emulator::update(address, [=](T old) { return old == expected ? value : old; }); \
  }
EMULATOR_ATOMIC_INTEGERS(int)
EMULATOR_ATOMIC_INTEGERS(unsigned)
EMULATOR_ATOMIC_INTEGERS(unsigned long long)
EMULATOR_ATOMIC(atomicMin, long long, value < old ? value : old)
EMULATOR_ATOMIC(atomicMax, long long, old < value ? value : old)
EMULATOR_ATOMIC(atomicSub, int, old - value)
EMULATOR_ATOMIC(atomicSub, unsigned, old - value)
EMULATOR_ATOMIC(atomicAdd, float, old + value)
EMULATOR_ATOMIC(atomicAdd, double, old + value)
EMULATOR_ATOMIC(atomicExch, float, (static_cast<void>(old), value))

#undef EMULATOR_ATOMIC_INTEGERS
#undef EMULATOR_ATOMIC

inline void __threadfence() { emulator::fence(); }
inline void __threadfence_block() { emulator::fence(); }
inline void __threadfence_system() { emulator::fence(); }
inline void __nanosleep(unsigned) { emulator::interleave(); }

namespace emulator {

// For mutants: atomic, or not.
template <class T>
T add(bool plain, T* address, T value) {
  if (!plain) return atomicAdd(address, value);
  const T old = *address;
  *address = old + value;
  return old;
}
template <class T>
T lower(bool plain, T* address, T value) {
  if (!plain) return atomicMin(address, value);
  const T old = *address;
  if (value < old) *address = value;
  return old;
}

}  // namespace emulator
