// Reserved address ranges of a GPU in which physical memory is mapped piece by piece.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "cuda/runtime/launch.h"

namespace dynemb::cuda {

class Reservation {
 public:
  Reservation(const char* op, int64_t bytes, int32_t device);
  ~Reservation();
  Reservation(const Reservation&) = delete;

  char* base() const { return base_; }
  int64_t bytes() const { return bytes_; }
  int32_t device() const { return device_; }
  // Nothing is mapped at or beyond this offset. Any thread may ask.
  int64_t mapped_end() const { return mapped_end_.load(std::memory_order_relaxed); }

  // Maps zeroed memory where [offset, offset + bytes) has none yet, and adds the offsets of the new
  // pieces to `added`, after an error too. false: the device has not that much memory. `stream` is
  // used to clear the memory, and waited for unless there is an error.
  bool map(const char* op, int64_t offset, int64_t bytes, cudaStream_t stream,
           std::vector<int64_t>* added);

  // Gives memory back that was mapped in one piece and lies wholly in [begin, end). A piece that
  // the driver refuses to unmap stays mapped, and what follows it.
  void unmap(const char* op, int64_t begin, int64_t end);
  // Gives the piece at this offset back, unless the driver refuses: for destructors.
  void drop_piece(int64_t offset);

 private:
  struct Piece {
    int64_t size;
    uint64_t handle;
  };
  void update_mapped_end();

  char* base_ = nullptr;
  int64_t bytes_ = 0;
  int64_t page_ = 0;
  int32_t device_;
  std::atomic<int64_t> mapped_end_{0};
  std::map<int64_t, Piece> pieces_;  // by offset
};

// Selects a device and waits for all that runs on it, without an exception: for destructors. While
// it lives, calls are allowed that the capture of another thread forbids.
class DeviceWait {
 public:
  explicit DeviceWait(int32_t device);
  ~DeviceWait();
  DeviceWait(const DeviceWait&) = delete;

  // false: waiting is not possible, as in a capture or at the end of the process.
  explicit operator bool() const { return waited_; }

 private:
  int before_ = -1;
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
  bool relaxed_ = false;
  bool waited_ = false;
};

// Words of host memory that kernels read and write; zeros at first. Kernels that do may still run
// when they end, so that waits for the device; where it is not possible, they are left to the
// process.
class PinnedWords {
 public:
  PinnedWords(const char* op, int32_t device, int64_t count);
  ~PinnedWords();
  PinnedWords(const PinnedWords&) = delete;

  volatile int64_t* host() const { return host_; }
  volatile int64_t* device() const { return device_words_; }

 private:
  int32_t device_;
  volatile int64_t* host_ = nullptr;
  volatile int64_t* device_words_ = nullptr;
};

// Destroys what belonged to a device's tables, now, or after the capture that is going on: waiting
// for the device and giving memory back would invalidate it.
void retire(int32_t device, std::shared_ptr<void> ended);
// Destroys what had to wait.
void drop_retired();

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
