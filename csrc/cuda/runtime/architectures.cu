// The GPUs with machine code in this library.

#include <cstdint>
#include <cstdlib>
#include <vector>

#include "cuda/runtime/launch.h"

namespace dynemb::cuda {
namespace {

#define DYNEMB_QUOTED(text) #text
#define DYNEMB_TEXT(text) DYNEMB_QUOTED(text)

// Numbers such as 80 for sm_80, ascending; none if the build used TORCH_CUDA_ARCH_LIST, and in the
// emulator. setup.py passes them in one word, such as 80_90_100, because nvcc splits at commas.
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
