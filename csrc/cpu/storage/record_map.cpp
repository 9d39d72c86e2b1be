#include "cpu/storage/record_map.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "core/index/handle.h"
#include "core/runtime/check.h"
#include "core/runtime/error_class.h"

namespace dynemb::cpu {
namespace {

size_t map_bytes(int64_t max_rows) {
  return static_cast<size_t>(std::max<int64_t>(max_rows, 1)) * sizeof(int64_t);
}

}  // namespace

RecordMap::RecordMap(int64_t max_rows) : max_rows_(max_rows) {
  void* data = mmap(nullptr, map_bytes(max_rows), PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  DYNEMB_CHECK(data != MAP_FAILED, "dynemb: could not reserve ", map_bytes(max_rows),
               " bytes of address space for the records of ", max_rows,
               " rows: ", std::strerror(errno), ". Lower max_rows of the tables", kHostMemoryError);
  madvise(data, map_bytes(max_rows), MADV_DONTDUMP);
  words_ = static_cast<int64_t*>(data);
}

RecordMap::~RecordMap() { munmap(words_, map_bytes(max_rows_)); }

int64_t RecordMap::find(int64_t handle) const {
  const int64_t row = handle_row(handle);
  if (row < 0 || row >= rows_) return kNone;
  const int64_t word = words_[row];
  return word != 0 && handle_generation(word) == handle_generation(handle) ? handle_row(word)
                                                                           : kNone;
}

bool RecordMap::has(int64_t handle) const {
  const int64_t row = handle_row(handle);
  if (row < 0 || row >= max_rows_) return false;
  const int64_t word = __atomic_load_n(words_ + row, __ATOMIC_RELAXED);
  return word != 0 && handle_generation(word) == handle_generation(handle);
}

int64_t RecordMap::number(int64_t row) const {
  if (row < 0 || row >= rows_ || words_[row] == 0) return kNone;
  return handle_row(words_[row]);
}

void RecordMap::set(int64_t handle, int64_t number) {
  const int64_t row = handle_row(handle);
  __atomic_store_n(words_ + row, make_handle(number, handle_generation(handle)), __ATOMIC_RELAXED);
  rows_ = std::max(rows_, row + 1);
}

void RecordMap::erase(int64_t handle) {
  __atomic_store_n(words_ + handle_row(handle), int64_t{0}, __ATOMIC_RELAXED);
}

std::vector<int64_t> RecordMap::entries() const { return {words_, words_ + rows_}; }

void RecordMap::assign(const std::vector<int64_t>& entries) {
  if (rows_ > 0) madvise(words_, map_bytes(max_rows_), MADV_DONTNEED);
  rows_ = static_cast<int64_t>(entries.size());
  std::copy(entries.begin(), entries.end(), words_);
}

}  // namespace dynemb::cpu
