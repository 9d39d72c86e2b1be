// Reserved address ranges of a GPU with physical memory mapped piece by piece.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "cuda/memory/row_budget.h"
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
  // Nothing is mapped at or beyond this offset. For any thread.
  int64_t mapped_end() const { return mapped_end_.load(std::memory_order_relaxed); }

  // From now on new pieces lie where the budget has room. Pieces that exist count as HBM.
  void set_budget(std::shared_ptr<RowBudget> budget);

  // Maps zeroed memory where [offset, offset + bytes) has none yet, and adds the offsets of the new
  // pieces to `added`, also after an error. `stream`: for clearing the memory; waited for unless
  // there is an error. `in_hbm`: whatever the budget is.
  Mapped map(const char* op, int64_t offset, int64_t bytes, cudaStream_t stream,
             std::vector<int64_t>* added, bool in_hbm = false);

  // Gives back memory that was mapped in one piece and lies wholly in [begin, end). If the driver
  // refuses to unmap a piece, that piece and later ones stay mapped.
  void unmap(const char* op, int64_t begin, int64_t end);
  // Gives back the piece at this offset, unless the driver refuses: for destructors.
  void drop_piece(int64_t offset);

 private:
  struct Piece {
    int64_t size;
    uint64_t handle;
    Place place;
  };
  // Maps a piece of at most so many bytes. Nothing changes if memory is short, or after an error.
  Mapped add_piece(const char* op, int64_t offset, int64_t most, bool in_hbm, int64_t* size);
  void give_back(const Piece& piece);
  void update_mapped_end();

  char* base_ = nullptr;
  int64_t bytes_ = 0;
  int64_t page_ = 0;
  int32_t device_;
  std::atomic<int64_t> mapped_end_{0};
  std::map<int64_t, Piece> pieces_;    // by offset
  std::shared_ptr<RowBudget> budget_;  // nullptr: all pieces lie in HBM
};

// Selects a device and waits for the streams that ops have used on it, without throwing: for
// destructors.
// During its lifetime, calls are allowed that the capture of another thread forbids.
class DeviceWait {
 public:
  explicit DeviceWait(int32_t device);
  ~DeviceWait();
  DeviceWait(const DeviceWait&) = delete;

  // false: waiting is impossible, as in a capture or at the end of the process.
  explicit operator bool() const { return waited_; }

 private:
  int before_ = -1;
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
  bool relaxed_ = false;
  bool waited_ = false;
};

// Words of host memory that kernels read and write; zeros at first. Kernels may still use them at
// destruction, so that waits for the device; if waiting is impossible, the words are leaked.
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

// Destroys objects of a device's tables, now, or after a capture of a stream that ops have used:
// the stream cannot be waited for during it.
void retire(int32_t device, std::shared_ptr<void> ended);
// Destroys the objects that had to wait.
void drop_retired();

// The reservation that a tensor of reserve_cuda lies in; nullptr for other memory.
std::shared_ptr<Reservation> find_reservation(const void* data);

// The stream for clearing memory and growing tables outside of a capture.
cudaStream_t side_stream(const char* op, int32_t device);

// Has torch give back the memory that it caches for the GPU, before a call fails for want of
// memory.
void empty_torch_cache();

// Allows calls that a stream capture forbids during its lifetime; they are not captured.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(const char* op);
  ~RelaxedCapture();

 private:
  cudaStreamCaptureMode mode_;
};

}  // namespace dynemb::cuda

// For ctypes: what empty_torch_cache() calls, from any thread; the ABI of torch has no such
// function.
extern "C" __attribute__((visibility("default"))) void dynemb_set_empty_cache(void (*function)());
