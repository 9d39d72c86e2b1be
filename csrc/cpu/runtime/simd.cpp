#include "cpu/runtime/simd.h"

#include <torch/csrc/stable/library.h>

#include <cstdint>

#include "core/runtime/check.h"

namespace dynemb::cpu {

SimdLevel detected_simd_level() {
#if DYNEMB_X86
  __builtin_cpu_init();
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") &&
                  __builtin_cpu_supports("bmi2");
  const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512vl");
  if (v4) return SimdLevel::kV4;
  if (v3) return SimdLevel::kV3;
#endif
  return SimdLevel::kBase;
}

std::atomic<int> active_simd_level{static_cast<int>(detected_simd_level())};

namespace {

int64_t simd_level() { return active_simd_level.load(); }

void set_simd_level(int64_t level) {
  const int64_t best = static_cast<int64_t>(detected_simd_level());
  DYNEMB_CHECK(level >= 0 && level <= best, "dynemb::set_simd_level: level is ", level,
               ", but this processor has levels 0 (baseline) to ", best,
               " (1: x86-64-v3, 2: x86-64-v4)");
  active_simd_level.store(static_cast<int>(level));
}

}  // namespace
}  // namespace dynemb::cpu

STABLE_TORCH_LIBRARY_IMPL(dynemb, CompositeExplicitAutograd, m) {
  m.impl("simd_level", TORCH_BOX(&dynemb::cpu::simd_level));
  m.impl("set_simd_level", TORCH_BOX(&dynemb::cpu::set_simd_level));
}
