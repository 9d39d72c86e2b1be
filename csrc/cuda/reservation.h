// Reserved address ranges of a GPU in which physical memory is mapped piece by piece.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "cuda/launch.h"

namespace dynemb::cuda {

class Reservation {
 public:
  Reservation(const char* op, int64_t bytes, int32_t device);
  ~Reservation();
  Reservation(const Reservation&) = delete;

  char* base() const { return base_; }
  int64_t bytes() const { return bytes_; }
  // Nothing is mapped at or beyond this offset. Any thread may ask.
  int64_t mapped_end() const { return mapped_end_.load(std::memory_order_relaxed); }

  // Maps zeroed memory where [offset, offset + bytes) has none yet. false: the device has not that
  // much memory; what has been mapped stays. `stream` is used to clear the memory, and waited for.
  bool map(const char* op, int64_t offset, int64_t bytes, cudaStream_t stream);

  // Gives memory back that was mapped in one piece and lies wholly in [begin, end).
  void unmap(const char* op, int64_t begin, int64_t end);

 private:
  struct Piece {
    int64_t size;
    uint64_t handle;
  };
  char* base_ = nullptr;
  int64_t bytes_ = 0;
  int64_t page_ = 0;
  int32_t device_;
  std::atomic<int64_t> mapped_end_{0};
  std::map<int64_t, Piece> pieces_;  // by offset
};

// The reservation that a tensor of reserve_cuda lies in; nullptr for other memory.
std::shared_ptr<Reservation> find_reservation(const void* data);

// The stream on which memory is cleared and tables are grown outside of a capture.
cudaStream_t side_stream(const char* op, int32_t device);

// Calls that a stream capture forbids are allowed while this lives; they are not captured.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(const char* op);
  ~RelaxedCapture();

 private:
  cudaStreamCaptureMode mode_;
};

}  // namespace dynemb::cuda
