// Facts about the build of this library, the tags of its ops, and its optimizers.
#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <string>
#include <vector>

#include "core/optimizers.h"
#include "op_tags.h"

namespace dynemb::cpu {
namespace {

// The compiler (0: GCC, 1: Clang), the three numbers of its version, and whether liburing is
// included.
std::vector<int64_t> compiled_with() {
#if defined(DYNEMB_HAS_URING)
  const int64_t uring = 1;
#else
  const int64_t uring = 0;
#endif
#if defined(__clang__)
  return {1, __clang_major__, __clang_minor__, __clang_patchlevel__, uring};
#else
  return {0, __GNUC__, __GNUC_MINOR__, __GNUC_PATCHLEVEL__, uring};
#endif
}

std::vector<std::string> op_tags() { return tagged_ops(); }

std::vector<std::string> optimizer_names() {
  return {std::begin(kOptimizerNames), std::end(kOptimizerNames)};
}

}  // namespace
}  // namespace dynemb::cpu

STABLE_TORCH_LIBRARY_IMPL(dynemb, CompositeExplicitAutograd, m) {
  m.impl("compiled_with", TORCH_BOX(&dynemb::cpu::compiled_with));
  m.impl("op_tags", TORCH_BOX(&dynemb::cpu::op_tags));
  m.impl("optimizer_names", TORCH_BOX(&dynemb::cpu::optimizer_names));
}
