#include <algorithm>

#include "cuda/memory/growing.h"

namespace dynemb::cuda {
namespace {

// Rows and buckets are mapped beyond the bound by an eighth and at most this many bytes a tensor.
constexpr int64_t kStepBytes = int64_t{64} << 20;

}  // namespace

void Growing::release(const char* op, int64_t rows, size_t spared) {
  if (rows >= mapped) return;
  mapped = rows;
  for (size_t i = 0; i < memory.size(); ++i) {
    const RowMemory& m = memory[i];
    if (i == spared) continue;
    m.reservation->unmap(op, m.begin + rows * m.row_bytes, m.begin + capacity * m.row_bytes);
  }
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

Mapped MappingAttempt::map(const char* op, Growing* growing, int64_t rows) {
  const int64_t mapped = growing->mapped;
  rows = std::min(rows, growing->capacity);
  if (rows <= mapped) return Mapped::kYes;
  int64_t most_bytes = 1;
  for (const RowMemory& m : growing->memory) most_bytes = std::max(most_bytes, m.row_bytes);
  const int64_t step = std::min(mapped / 8, kStepBytes / most_bytes);
  const size_t first = pieces_.size();
  Mapped result = Mapped::kYes;
  for (const int64_t target : {std::min(growing->capacity, std::max(rows, mapped + step)), rows}) {
    result = Mapped::kYes;
    for (const RowMemory& m : growing->memory) {
      if (result == Mapped::kYes) result = map_part(op, m, mapped, target);
    }
    if (result == Mapped::kYes) {
      grown_.push_back({growing, mapped});
      growing->mapped = target;
      return result;
    }
    give_back(first);
  }
  return result;
}

Mapped MappingAttempt::map_part(const char* op, const RowMemory& part, int64_t begin, int64_t end) {
  pieces_.push_back({part.reservation, {}});
  return part.reservation->map(op, part.begin + begin * part.row_bytes,
                               (end - begin) * part.row_bytes, stream_, &pieces_.back().offsets,
                               part.in_hbm);
}

void MappingAttempt::keep() {
  pieces_.clear();
  grown_.clear();
}

MappingAttempt::~MappingAttempt() {
  give_back(0);
  for (auto one = grown_.rbegin(); one != grown_.rend(); ++one) one->growing->mapped = one->before;
}

void MappingAttempt::give_back(size_t first) {
  if (pieces_.size() <= first) return;
  // it may still be cleared, after an error
  if (cudaStreamSynchronize(stream_) != cudaSuccess) cudaGetLastError();
  for (; pieces_.size() > first; pieces_.pop_back()) {
    for (const int64_t offset : pieces_.back().offsets) {
      pieces_.back().reservation->drop_piece(offset);
    }
  }
}

}  // namespace dynemb::cuda
