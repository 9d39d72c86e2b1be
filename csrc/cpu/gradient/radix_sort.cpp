#include "cpu/gradient/radix_sort.h"

#include <algorithm>

#include "cpu/index/args.h"

namespace dynemb::cpu {
namespace {

constexpr int kMaxDigitBits = 11;  // 2048 counters of 8 bytes stay in the first-level cache
constexpr int64_t kItemsPerChunk = 1 << 13;
constexpr int64_t kMaxChunks = 16;

// Chunks of a sort, shared by threads.
int64_t chunks_of(int64_t count) {
  return std::clamp<int64_t>((count + kItemsPerChunk - 1) / kItemsPerChunk, 1, kMaxChunks);
}

// A digit of an item.
struct Digit {
  int shift;
  uint64_t mask;

  uint64_t of(uint64_t item) const { return (item >> shift) & mask; }
};

// Counts the digits. Arguments are values, so that they cannot alias the counters.
void count_digits(const uint64_t* items, int64_t count, Digit digit, int64_t* counter) {
  for (int64_t i = 0; i < count; ++i) ++counter[digit.of(items[i])];
}

void move_items(const uint64_t* items, int64_t count, Digit digit, int64_t* next, uint64_t* to) {
  for (int64_t i = 0; i < count; ++i) to[next[digit.of(items[i])]++] = items[i];
}

// Sorts items[0 .. count); returns the array with the result: items or other.
uint64_t* sort_range(uint64_t* items, uint64_t* other, int64_t count, int64_t chunks, int low_bit,
                     int high_bit) {
  const int bits = high_bit - low_bit;
  if (count <= 1 || bits <= 0) return items;
  const int passes = (bits + kMaxDigitBits - 1) / kMaxDigitBits;
  const int digit_bits = (bits + passes - 1) / passes;
  const int64_t digits = int64_t{1} << digit_bits;
  const auto chunk_begin = [&](int64_t c) { return count * c / chunks; };
  std::vector<int64_t> position(static_cast<size_t>(chunks * digits));
  for (int pass = 0; pass < passes; ++pass) {
    const Digit digit{low_bit + pass * digit_bits, static_cast<uint64_t>(digits - 1)};
    std::fill(position.begin(), position.end(), 0);
    parallel_units(chunks, count, [&](int64_t begin, int64_t end) {
      for (int64_t c = begin; c < end; ++c) {
        count_digits(items + chunk_begin(c), chunk_begin(c + 1) - chunk_begin(c), digit,
                     position.data() + c * digits);
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
        move_items(items + chunk_begin(c), chunk_begin(c + 1) - chunk_begin(c), digit,
                   position.data() + c * digits, other);
      }
    });
    std::swap(items, other);
  }
  return items;
}

// The bit above the highest one in which items differ, at most high_bit.
int highest_bit(const uint64_t* items, int64_t count, int low_bit, int high_bit) {
  uint64_t differ = 0;
  for (int64_t i = 0; i < count; ++i) differ |= items[i] ^ items[0];
  int bit = high_bit;
  while (bit > low_bit && (differ >> (bit - 1) & 1) == 0) --bit;
  return bit;
}

}  // namespace

void radix_sort(Scratch<uint64_t>& items, int low_bit, int high_bit) {
  const auto count = static_cast<int64_t>(items.size());
  Scratch<uint64_t> other(items.size());
  if (sort_range(items.data(), other.data(), count, chunks_of(count), low_bit, high_bit) !=
      items.data()) {
    items.swap(other);
  }
}

void radix_sort_parts(Scratch<uint64_t>& items, const std::vector<size_t>& part, int low_bit,
                      int high_bit) {
  if (part.size() <= 2) return radix_sort(items, low_bit, high_bit);
  const auto sort = [&](size_t p, Scratch<uint64_t>& other, bool shared) {
    uint64_t* begin = items.data() + part[p];
    const auto count = static_cast<int64_t>(part[p + 1] - part[p]);
    if (other.size() < static_cast<size_t>(count)) other.resize(count);
    const int64_t chunks = shared ? chunks_of(count) : 1;
    const int top = highest_bit(begin, count, low_bit, high_bit);
    const uint64_t* sorted = sort_range(begin, other.data(), count, chunks, low_bit, top);
    if (sorted != begin) std::copy_n(sorted, count, begin);
  };
  // threads share each of the large parts, then divide the small ones
  const size_t large = std::max<size_t>(items.size() / 8, kItemsPerChunk);
  std::vector<size_t> small;
  Scratch<uint64_t> scratch;
  for (size_t p = 0; p + 1 < part.size(); ++p) {
    if (part[p + 1] - part[p] < large) {
      small.push_back(p);
    } else {
      sort(p, scratch, true);
    }
  }
  parallel_units(static_cast<int64_t>(small.size()), static_cast<int64_t>(items.size()),
                 [&](int64_t begin, int64_t end) {
                   Scratch<uint64_t> other;
                   for (int64_t k = begin; k < end; ++k) sort(small[k], other, false);
                 });
}

}  // namespace dynemb::cpu
