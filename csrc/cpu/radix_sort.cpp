#include "cpu/radix_sort.h"

#include <algorithm>

#include "cpu/index_view.h"

namespace dynemb::cpu {
namespace {

constexpr int kMaxDigitBits = 11;  // 2048 counters of 8 bytes stay in the first-level cache
constexpr int64_t kItemsPerChunk = 1 << 14;
constexpr int64_t kMaxChunks = 16;

}  // namespace

void radix_sort(std::vector<uint64_t>& items, int low_bit, int high_bit) {
  const int64_t count = static_cast<int64_t>(items.size());
  const int bits = high_bit - low_bit;
  if (count <= 1 || bits <= 0) return;
  const int passes = (bits + kMaxDigitBits - 1) / kMaxDigitBits;
  const int digit_bits = (bits + passes - 1) / passes;
  const int64_t digits = int64_t{1} << digit_bits;
  const uint64_t mask = static_cast<uint64_t>(digits - 1);
  const int64_t chunks =
      std::clamp<int64_t>((count + kItemsPerChunk - 1) / kItemsPerChunk, 1, kMaxChunks);
  const auto chunk_begin = [&](int64_t c) { return count * c / chunks; };
  std::vector<uint64_t> other(items.size());
  std::vector<int64_t> position(static_cast<size_t>(chunks * digits));
  for (int pass = 0; pass < passes; ++pass) {
    const int shift = low_bit + pass * digit_bits;
    std::fill(position.begin(), position.end(), 0);
    parallel_units(chunks, count, [&](int64_t begin, int64_t end) {
      for (int64_t c = begin; c < end; ++c) {
        int64_t* counter = position.data() + c * digits;
        for (int64_t i = chunk_begin(c); i < chunk_begin(c + 1); ++i) {
          ++counter[(items[i] >> shift) & mask];
        }
      }
    });
    int64_t sum = 0;
    for (int64_t d = 0; d < digits; ++d) {
      for (int64_t c = 0; c < chunks; ++c) {
        const int64_t n = position[c * digits + d];
        position[c * digits + d] = sum;
        sum += n;
      }
    }
    parallel_units(chunks, count, [&](int64_t begin, int64_t end) {
      for (int64_t c = begin; c < end; ++c) {
        int64_t* next = position.data() + c * digits;
        for (int64_t i = chunk_begin(c); i < chunk_begin(c + 1); ++i) {
          other[next[(items[i] >> shift) & mask]++] = items[i];
        }
      }
    });
    items.swap(other);
  }
}

}  // namespace dynemb::cpu
