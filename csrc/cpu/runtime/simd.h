// Leaf kernels are compiled for three instruction sets and chosen at run time.
//
// All levels give the same bits: no contraction to fused multiply-add, and no reordering of sums
// (sums over a row have a fixed number of lanes). Tests run and compare all levels of the machine.
#pragma once

#include <atomic>

namespace dynemb::cpu {

enum class SimdLevel : int { kBase = 0, kV3 = 1, kV4 = 2 };  // x86-64 psABI levels

SimdLevel detected_simd_level();
extern std::atomic<int> active_simd_level;

}  // namespace dynemb::cpu

#if defined(__x86_64__) && defined(__GNUC__)
#define DYNEMB_X86 1
#define DYNEMB_TARGET_V3 __attribute__((target("avx2,bmi,bmi2,lzcnt,f16c,movbe")))
#define DYNEMB_TARGET_V4 \
  __attribute__((        \
      target("avx2,bmi,bmi2,lzcnt,f16c,movbe,avx512f,avx512bw,avx512cd,avx512dq,avx512vl")))
#else
#define DYNEMB_X86 0
#endif

#define DYNEMB_INLINE inline __attribute__((always_inline))

// DYNEMB_SIMD_VARIANTS(find_block, (const Job& job), (job)) defines find_block(job), which calls
// the variant of the always-inline function find_block_body(job) for the active level. The function
// returns nothing. DYNEMB_SIMD_TEMPLATE_VARIANTS takes a template head first; the template
// arguments are deduced from the function's arguments.
#if DYNEMB_X86
#define DYNEMB_SIMD_DISPATCH(head, name, parameters, arguments)                 \
  head static inline void name parameters {                                     \
    switch (::dynemb::cpu::active_simd_level.load(std::memory_order_relaxed)) { \
      case 2:                                                                   \
        return name##_v4 arguments;                                             \
      case 1:                                                                   \
        return name##_v3 arguments;                                             \
      default:                                                                  \
        return name##_base arguments;                                           \
    }                                                                           \
  }
#define DYNEMB_SIMD_TEMPLATE_VARIANTS(head, name, parameters, arguments)            \
  head static void name##_base parameters { name##_body arguments; }                \
  head DYNEMB_TARGET_V3 static void name##_v3 parameters { name##_body arguments; } \
  head DYNEMB_TARGET_V4 static void name##_v4 parameters { name##_body arguments; } \
  DYNEMB_SIMD_DISPATCH(head, name, parameters, arguments)
#else
#define DYNEMB_SIMD_TEMPLATE_VARIANTS(head, name, parameters, arguments) \
  head static inline void name parameters { name##_body arguments; }
#endif
#define DYNEMB_SIMD_VARIANTS(name, parameters, arguments) \
  DYNEMB_SIMD_TEMPLATE_VARIANTS(, name, parameters, arguments)

// Instruction sets as types, for kernels that depend on the width of vectors or on an instruction.
// DYNEMB_SIMD_TYPED_VARIANTS(find_block, (const Job& job), (job)) calls
// find_block_body<BaseLevel>(job), or that of the active level; a template head may come first, as
// above.
namespace dynemb::cpu {

struct BaseLevel {};
struct V3Level {};
struct V4Level {};

}  // namespace dynemb::cpu

#if DYNEMB_X86
#define DYNEMB_SIMD_TYPED_TEMPLATE_VARIANTS(head, name, parameters, arguments)                 \
  head static void name##_base parameters { name##_body<::dynemb::cpu::BaseLevel> arguments; } \
  head DYNEMB_TARGET_V3 static void name##_v3 parameters {                                     \
    name##_body<::dynemb::cpu::V3Level> arguments;                                             \
  }                                                                                            \
  head DYNEMB_TARGET_V4 static void name##_v4 parameters {                                     \
    name##_body<::dynemb::cpu::V4Level> arguments;                                             \
  }                                                                                            \
  DYNEMB_SIMD_DISPATCH(head, name, parameters, arguments)
#else
#define DYNEMB_SIMD_TYPED_TEMPLATE_VARIANTS(head, name, parameters, arguments) \
  head static inline void name parameters { name##_body<::dynemb::cpu::BaseLevel> arguments; }
#endif
#define DYNEMB_SIMD_TYPED_VARIANTS(name, parameters, arguments) \
  DYNEMB_SIMD_TYPED_TEMPLATE_VARIANTS(, name, parameters, arguments)
