// Places of the rows of a group that may exceed GPU memory: HBM up to a budget, then host memory.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>

namespace dynemb::cuda {

enum class Place { kHbm, kHost };

// Result of mapping memory.
enum class Mapped { kYes, kHbmIsFull, kHostIsFull };

// Shared by the reservations of the rows. For any thread.
class RowBudget {
 public:
  static constexpr int64_t kNoLimit = -1;

  // `host_bytes`: kNoLimit, or an upper bound.
  RowBudget(int64_t hbm_bytes, int64_t host_bytes)
      : hbm_bytes_(hbm_bytes), host_bytes_(host_bytes) {}

  struct Share {
    Place place;
    int64_t bytes;
  };
  // Books bytes, or the first pages of them: in HBM while the budget lasts, then in host memory.
  // Nothing is booked where host memory is short: within the bound, or in the machine.
  std::optional<Share> take(int64_t bytes, int64_t page);
  // Books bytes in HBM, whatever the budget is: mapped before there was one, or of a cache.
  Share add_hbm(int64_t bytes);
  void give_back(const Share& share);

  struct Bytes {
    int64_t hbm;
    int64_t host;
  };
  Bytes used() const;
  Bytes limits() const { return {hbm_bytes_, host_bytes_}; }
  // Host memory that may still be taken: within the bound, and in the machine.
  int64_t host_left() const;

 private:
  int64_t host_left_locked() const;

  const int64_t hbm_bytes_;
  const int64_t host_bytes_;
  mutable std::mutex mutex_;
  Bytes used_{0, 0};
};

}  // namespace dynemb::cuda
