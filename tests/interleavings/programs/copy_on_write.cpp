// A save reads rows while two threads write them: csrc/cpu/rows/copy_on_write.h.
#include "cpu/rows/copy_on_write.h"

#include <algorithm>
#include <cstring>

#include "checker.h"

namespace {

using namespace dynemb;
using namespace dynemb::cpu;

constexpr int64_t kRows = 2, kRowWords = 2, kRowBytes = 8 * kRowWords;
// one place for two rows, so that writers wait for it
enum Words : int64_t { kMarks = kCowColumns, kFree, kBuffer, kWords = kBuffer + kRowWords };

alignas(64) int64_t words[kWords], rows[kRows][kRowWords], saved[kRows][kRowWords];

SlabState state_of(int64_t* copy_on_write) {
  SlabState state{};
  state.copy_on_write = copy_on_write;
  state.copy_on_write_words = kWords;
  return state;
}

void write(int64_t row, int64_t value) {
  const int64_t values[kRowWords] = {value, value};
  const char* bytes = reinterpret_cast<const char*>(rows[row]);
  const SlabState state = state_of(words);
  if (copies_on_write(state)) copy_before_write(state, row, bytes, kRowBytes);
  std::memcpy(rows[row], values, kRowBytes);
}

void save() {
  for (int64_t row = 0; row < kRows; ++row) {
    take_row(state_of(words), row, reinterpret_cast<const char*>(rows[row]), kRowBytes,
             state_of(nullptr), row, reinterpret_cast<char*>(saved[row]));
  }
  __atomic_store_n(words + kCowActive, 0, __ATOMIC_RELAXED);
}

interleavings::Execution begin() {
  std::fill(std::begin(words), std::end(words), 0);
  words[kCowRows] = kRows, words[kCowPlaces] = words[kCowGiven] = 1;
  words[kCowRowBytes] = kRowBytes, words[kCowMarks] = kMarks, words[kCowFree] = kFree;
  words[kCowBuffer] = kBuffer, words[kCowActive] = 1;
  for (int64_t row = 0; row < kRows; ++row) {
    std::fill(rows[row], rows[row] + kRowWords, 10 + row);
    std::fill(saved[row], saved[row] + kRowWords, 0);
  }
  interleavings::share(words, sizeof words, interleavings::Access::kGuarded);
  interleavings::share(rows, sizeof rows, interleavings::Access::kRacing);
  const auto check = [] {
    for (int64_t row = 0; row < kRows; ++row) {
      for (const int64_t word : saved[row]) {
        interleavings::require(word == 10 + row, "the save has a row that was written meanwhile");
      }
    }
  };
  return {{save, [] { write(0, 1), write(0, 2); }, [] { write(1, 3); }}, check};
}

}  // namespace

int main(int argc, char** argv) { return interleavings::explore(argc, argv, begin); }
