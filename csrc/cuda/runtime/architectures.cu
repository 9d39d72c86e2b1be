// For which GPUs this library has machine code.

#include <cstdint>
#include <cstdlib>
#include <vector>

#include "cuda/runtime/launch.h"

namespace dynemb::cuda {
namespace {

#define DYNEMB_QUOTED(text) #text
#define DYNEMB_TEXT(text) DYNEMB_QUOTED(text)

// Numbers as of sm_80, ascending; none where the build was told by TORCH_CUDA_ARCH_LIST, and on the
// emulator. setup.py gives them in one word, such as 80_90_100, because nvcc divides at commas.
std::vector<int64_t> cuda_architectures() {
  std::vector<int64_t> numbers;
#if defined(DYNEMB_CUDA_ARCHITECTURES)
  for (const char* at = DYNEMB_TEXT(DYNEMB_CUDA_ARCHITECTURES); *at != '\0';) {
    char* end = nullptr;
    numbers.push_back(std::strtol(at, &end, 10));
    at = *end == '_' ? end + 1 : end;
  }
#endif
  return numbers;
}

}  // namespace
}  // namespace dynemb::cuda

DYNEMB_IMPLEMENT_DEVICELESS_OPS(m) {
  m.impl("cuda_architectures", TORCH_BOX(&dynemb::cuda::cuda_architectures));
}
