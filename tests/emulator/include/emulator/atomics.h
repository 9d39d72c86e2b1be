// Atomic operations, for the types for which CUDA has them; long is none of them. Threads run one
// at a time, so plain reads and writes do.
#pragma once

#include "emulator/synchronization.h"

namespace emulator {

template <class T, class Change>
T update(T* address, Change change) {
  interleave();
  const T old = *address;
  *address = change(old);
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

inline void __threadfence() { emulator::interleave(); }
inline void __threadfence_block() { emulator::interleave(); }
inline void __threadfence_system() { emulator::interleave(); }
inline void __nanosleep(unsigned) { emulator::interleave(); }
