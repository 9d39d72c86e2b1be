#include <algorithm>

#include "cuda/memory/growing.h"

namespace dynemb::cuda {
namespace {

// Rows and buckets are mapped beyond the bound by an eighth and at most this many bytes a tensor.
constexpr int64_t kStepBytes = int64_t{64} << 20;

}  // namespace

bool Growing::map(const char* op, int64_t rows, cudaStream_t stream) {
  rows = std::min(rows, capacity);
  if (rows <= mapped) return true;
  int64_t most_bytes = 1;
  for (const RowMemory& m : memory) most_bytes = std::max(most_bytes, m.row_bytes);
  const int64_t step = std::min(mapped / 8, kStepBytes / most_bytes);
  for (const int64_t target : {std::min(capacity, std::max(rows, mapped + step)), rows}) {
    bool complete = true;
    for (const RowMemory& m : memory) {
      complete = complete && m.reservation->map(op, m.begin + mapped * m.row_bytes,
                                                (target - mapped) * m.row_bytes, stream);
    }
    if (complete) {
      mapped = target;
      return true;
    }
  }
  return false;
}

void Growing::release(const char* op, int64_t rows, size_t spared) {
  if (rows >= mapped) return;
  for (size_t i = 0; i < memory.size(); ++i) {
    const RowMemory& m = memory[i];
    if (i == spared) continue;
    m.reservation->unmap(op, m.begin + rows * m.row_bytes, m.begin + capacity * m.row_bytes);
  }
  mapped = rows;
}

void Growing::need(int64_t rows) { needed = std::max(needed, rows); }

int64_t Growing::useful(int64_t held) const {
  const int64_t rows = std::max({held, kept, needed, needed_before, int64_t{1}});
  return std::min(mapped, rows + rows / 8);
}

void Growing::begin_period() {
  needed_before = needed;
  needed = 0;
}

bool Growing::is_mapped(int64_t rows) const { return std::min(rows, capacity) <= mapped; }

int64_t Growing::row_bytes() const {
  int64_t total = 0;
  for (const RowMemory& m : memory) total += m.row_bytes;
  return total;
}

int64_t Growing::missing_bytes(int64_t rows) const {
  return std::max<int64_t>(std::min(rows, capacity) - mapped, 0) * row_bytes();
}

}  // namespace dynemb::cuda
