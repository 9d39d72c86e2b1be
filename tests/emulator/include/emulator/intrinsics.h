// Loads and stores with cache hints, bits, and arithmetic of one rounding.
#pragma once

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#include "emulator/order.h"
#include "emulator/types.h"

// Accesses of the L2 cache, in which threads of different blocks may meet: relaxed atomics for
// ThreadSanitizer.
namespace emulator {

template <class T>
T load_shared_word(const T* from) {
#if defined(EMULATOR_RACES)
  if constexpr (std::is_arithmetic_v<T>) {
    T value;
    __atomic_load(from, &value, __ATOMIC_RELAXED);
    order_after_read(from);
    return value;
  }
#endif
  return *from;
}
template <class T>
void store_shared_word(T* to, T value) {
#if defined(EMULATOR_RACES)
  if constexpr (std::is_arithmetic_v<T>) {
    order_before_write(to);
    __atomic_store(to, &value, __ATOMIC_RELAXED);
    return;
  }
#endif
  *to = value;
}

}  // namespace emulator

#define EMULATOR_ACCESSES(T)                                                     \
  inline T __ldg(const T* from) { return *from; }                                \
  inline T __ldca(const T* from) { return *from; }                               \
  inline T __ldcg(const T* from) { return emulator::load_shared_word(from); }    \
  inline T __ldcs(const T* from) { return *from; }                               \
  inline T __ldcv(const T* from) { return emulator::load_shared_word(from); }    \
  inline T __ldlu(const T* from) { return *from; }                               \
  inline void __stcg(T* to, T value) { emulator::store_shared_word(to, value); } \
  inline void __stcs(T* to, T value) { *to = value; }                            \
  inline void __stwb(T* to, T value) { *to = value; }                            \
  inline void __stwt(T* to, T value) { *to = value; }
EMULATOR_ACCESSES(signed char)
EMULATOR_ACCESSES(unsigned char)
EMULATOR_ACCESSES(short)
EMULATOR_ACCESSES(unsigned short)
EMULATOR_ACCESSES(int)
EMULATOR_ACCESSES(unsigned)
EMULATOR_ACCESSES(long)
EMULATOR_ACCESSES(unsigned long)
EMULATOR_ACCESSES(long long)
EMULATOR_ACCESSES(unsigned long long)
EMULATOR_ACCESSES(float)
EMULATOR_ACCESSES(double)
EMULATOR_ACCESSES(int2)
EMULATOR_ACCESSES(int4)
EMULATOR_ACCESSES(uint2)
EMULATOR_ACCESSES(uint4)
EMULATOR_ACCESSES(longlong2)
EMULATOR_ACCESSES(ulonglong2)
EMULATOR_ACCESSES(float2)
EMULATOR_ACCESSES(float4)
EMULATOR_ACCESSES(double2)
#undef EMULATOR_ACCESSES

#define EMULATOR_MIN_MAX(T)                           \
  constexpr T min(T a, T b) { return b < a ? b : a; } \
  constexpr T max(T a, T b) { return a < b ? b : a; }
EMULATOR_MIN_MAX(int)
EMULATOR_MIN_MAX(unsigned)
EMULATOR_MIN_MAX(long)
EMULATOR_MIN_MAX(unsigned long)
EMULATOR_MIN_MAX(long long)
EMULATOR_MIN_MAX(unsigned long long)
#undef EMULATOR_MIN_MAX
inline float min(float a, float b) { return std::fmin(a, b); }
inline float max(float a, float b) { return std::fmax(a, b); }
inline double min(double a, double b) { return std::fmin(a, b); }
inline double max(double a, double b) { return std::fmax(a, b); }

inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __popcll(unsigned long long value) { return __builtin_popcountll(value); }
inline int __ffs(int value) { return __builtin_ffs(value); }
inline int __ffsll(long long value) { return __builtin_ffsll(value); }
inline int __clz(int value) {
  return value == 0 ? 32 : __builtin_clz(static_cast<unsigned>(value));
}
inline int __clzll(long long value) {
  return value == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(value));
}
inline unsigned __brev(unsigned value) {
  unsigned reversed = 0;
  for (int i = 0; i < 32; ++i) reversed |= ((value >> i) & 1u) << (31 - i);
  return reversed;
}
inline unsigned long long __brevll(unsigned long long value) {
  return (static_cast<unsigned long long>(__brev(static_cast<unsigned>(value))) << 32) |
         __brev(static_cast<unsigned>(value >> 32));
}
inline int __mulhi(int a, int b) { return static_cast<int>((static_cast<long long>(a) * b) >> 32); }
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>((static_cast<unsigned long long>(a) * b) >> 32);
}
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>((static_cast<unsigned __int128>(a) * b) >> 64);
}
inline long long __mul64hi(long long a, long long b) {
  return static_cast<long long>((static_cast<__int128>(a) * b) >> 64);
}

#define EMULATOR_BITS(name, To, From)          \
  inline To name(From value) {                 \
    static_assert(sizeof(To) == sizeof(From)); \
    To result;                                 \
    std::memcpy(&result, &value, sizeof(To));  \
    return result;                             \
  }
EMULATOR_BITS(__float_as_int, int, float)
EMULATOR_BITS(__float_as_uint, unsigned, float)
EMULATOR_BITS(__int_as_float, float, int)
EMULATOR_BITS(__uint_as_float, float, unsigned)
EMULATOR_BITS(__double_as_longlong, long long, double)
EMULATOR_BITS(__longlong_as_double, double, long long)
#undef EMULATOR_BITS

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __dsqrt_rn(double a) { return std::sqrt(a); }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
inline float __int2float_rn(int value) { return static_cast<float>(value); }
inline float __uint2float_rn(unsigned value) { return static_cast<float>(value); }

[[noreturn]] inline void __trap() { std::abort(); }
