#include "cpu/storage/crc32c.h"

#include <torch/csrc/stable/library.h>

#include <cstring>

#include "arguments/storage.h"
#include "core/storage/crc32c.h"
#include "cpu/runtime/results.h"
#include "cpu/runtime/simd.h"

#if DYNEMB_X86
#include <nmmintrin.h>
#define DYNEMB_CRC32C_INSTRUCTIONS 1
#define DYNEMB_TARGET_CRC32C __attribute__((target("sse4.2")))
#elif defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#define DYNEMB_CRC32C_INSTRUCTIONS 1
#define DYNEMB_TARGET_CRC32C
#else
#define DYNEMB_CRC32C_INSTRUCTIONS 0
#endif

namespace dynemb::cpu {
namespace {

#if DYNEMB_CRC32C_INSTRUCTIONS

#if DYNEMB_X86
DYNEMB_TARGET_CRC32C inline uint64_t with_word(uint64_t crc, uint64_t word) {
  return _mm_crc32_u64(crc, word);
}
DYNEMB_TARGET_CRC32C inline uint64_t with_byte(uint64_t crc, unsigned char byte) {
  return _mm_crc32_u8(static_cast<uint32_t>(crc), byte);
}
#else
inline uint64_t with_word(uint64_t crc, uint64_t word) {
  return __crc32cd(static_cast<uint32_t>(crc), word);
}
inline uint64_t with_byte(uint64_t crc, unsigned char byte) {
  return __crc32cb(static_cast<uint32_t>(crc), byte);
}
#endif

uint64_t word_at(const unsigned char* data) {
  uint64_t word;
  std::memcpy(&word, data, sizeof(word));
  return word;
}

// An instruction takes three cycles, but one can begin in every cycle. So three parts of kPart
// bytes each are computed side by side. Their registers add up, after those of the first two are
// moved over the bytes that follow.
template <size_t kPart>
DYNEMB_TARGET_CRC32C uint64_t in_three_parts(uint64_t crc, const unsigned char*& data,
                                             size_t& bytes) {
  static constexpr Crc32cZeros kZeros = make_crc32c_zeros(kPart);
  for (; bytes >= 3 * kPart; bytes -= 3 * kPart, data += 3 * kPart) {
    uint64_t second = 0;
    uint64_t third = 0;
    for (size_t i = 0; i < kPart; i += sizeof(uint64_t)) {
      crc = with_word(crc, word_at(data + i));
      second = with_word(second, word_at(data + kPart + i));
      third = with_word(third, word_at(data + 2 * kPart + i));
    }
    crc = kZeros.after(static_cast<uint32_t>(crc)) ^ second;
    crc = kZeros.after(static_cast<uint32_t>(crc)) ^ third;
  }
  return crc;
}

constexpr size_t kLongPart = 4096;
constexpr size_t kShortPart = 256;
// for records of a few hundred bytes
constexpr size_t kRecordPart = 160;
constexpr size_t kSmallPart = 64;

DYNEMB_TARGET_CRC32C uint32_t crc32c_by_instructions(uint32_t begin, const unsigned char* data,
                                                     size_t bytes) {
  uint64_t crc = begin;
  crc = in_three_parts<kLongPart>(crc, data, bytes);
  crc = in_three_parts<kShortPart>(crc, data, bytes);
  crc = in_three_parts<kRecordPart>(crc, data, bytes);
  crc = in_three_parts<kSmallPart>(crc, data, bytes);
  for (; bytes >= sizeof(uint64_t); bytes -= sizeof(uint64_t), data += sizeof(uint64_t)) {
    crc = with_word(crc, word_at(data));
  }
  for (; bytes > 0; --bytes, ++data) crc = with_byte(crc, *data);
  return static_cast<uint32_t>(crc);
}

// x86-64-v3 and above have SSE4.2. Elsewhere a compiler that defines the macro may use the
// instructions unconditionally.
bool has_instructions() {
#if DYNEMB_X86
  return active_simd_level.load(std::memory_order_relaxed) >= static_cast<int>(SimdLevel::kV3);
#else
  return true;
#endif
}

#endif  // DYNEMB_CRC32C_INSTRUCTIONS

Tensor crc32c_op(Tensor data, int64_t crc) {
  check_summed_bytes("crc32c", data, crc);
  const auto bytes = static_cast<size_t>(data.numel()) * static_cast<size_t>(data.element_size());
  Tensor sum = empty_cpu({}, ScalarType::Long);
  *static_cast<int64_t*>(sum.data_ptr()) =
      crc32c(static_cast<uint32_t>(crc), data.data_ptr(), bytes);
  return sum;
}

}  // namespace

uint32_t crc32c(uint32_t crc, const void* data, size_t bytes) {
  const auto* first = static_cast<const unsigned char*>(data);
#if DYNEMB_CRC32C_INSTRUCTIONS
  if (has_instructions()) return ~crc32c_by_instructions(~crc, first, bytes);
#endif
  return ~crc32c_by_tables(~crc, first, bytes);
}

}  // namespace dynemb::cpu

STABLE_TORCH_LIBRARY_IMPL(dynemb, CPU, m) { m.impl("crc32c", TORCH_BOX(&dynemb::cpu::crc32c_op)); }

// For error messages about a GPU's tensor, also in builds without CUDA kernels.
STABLE_TORCH_LIBRARY_IMPL(dynemb, CUDA, m) { m.impl("crc32c", TORCH_BOX(&dynemb::cpu::crc32c_op)); }
