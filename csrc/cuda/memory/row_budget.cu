#include <algorithm>

#include "core/runtime/available_memory.h"
#include "cuda/memory/row_budget.h"

namespace dynemb::cuda {

std::optional<RowBudget::Share> RowBudget::take(int64_t bytes, int64_t page) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const int64_t in_hbm = std::min(bytes, (hbm_bytes_ - used_.hbm) / page * page);
  if (in_hbm > 0) {
    used_.hbm += in_hbm;
    return Share{Place::kHbm, in_hbm};
  }
  if (bytes > host_left_locked()) return std::nullopt;
  used_.host += bytes;
  return Share{Place::kHost, bytes};
}

RowBudget::Share RowBudget::add_hbm(int64_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  used_.hbm += bytes;
  return {Place::kHbm, bytes};
}

void RowBudget::give_back(const Share& share) {
  const std::lock_guard<std::mutex> lock(mutex_);
  (share.place == Place::kHbm ? used_.hbm : used_.host) -= share.bytes;
}

RowBudget::Bytes RowBudget::used() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return used_;
}

int64_t RowBudget::host_left() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return host_left_locked();
}

int64_t RowBudget::host_left_locked() const {
  const int64_t available = available_memory();
  return host_bytes_ == kNoLimit ? available : std::min(available, host_bytes_ - used_.host);
}

}  // namespace dynemb::cuda
