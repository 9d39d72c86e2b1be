// Kernel launches, streams and scratch memory: host code of every CUDA op.
//
// Tests compile these sources for an emulator on the CPU (DYNEMB_EMULATED), where ops are
// registered for CPU tensors under another namespace.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "arguments/tensors.h"
#include "core/runtime/device_error.h"
#include "library.h"

#if defined(DYNEMB_EMULATED)
#define DYNEMB_IMPLEMENT_IN(library, m) STABLE_TORCH_LIBRARY_IMPL(library, CPU, m)
#else
#define DYNEMB_IMPLEMENT_IN(library, m) STABLE_TORCH_LIBRARY_IMPL(library, CUDA, m)
#endif
#define DYNEMB_IMPLEMENT_OPS(m) DYNEMB_IMPLEMENT_IN(DYNEMB_LIBRARY, m)
// Ops without a tensor argument, so without a device for dispatch.
#define DYNEMB_IMPLEMENT_DEVICELESS_IN(library, m) \
  STABLE_TORCH_LIBRARY_IMPL(library, CompositeExplicitAutograd, m)
#define DYNEMB_IMPLEMENT_DEVICELESS_OPS(m) DYNEMB_IMPLEMENT_DEVICELESS_IN(DYNEMB_LIBRARY, m)

namespace dynemb::cuda {

// Launch shapes of a GPU, by architecture (tuning_of in launch.cu).
struct Tuning {
  int64_t block;          // threads of a block
  int64_t blocks_per_sm;  // blocks of a grid-stride kernel, per multiprocessor
  int64_t multiprocessors;
};
const Tuning& tuning(int32_t device);

// Raises with the name of the op and CUDA's message.
void check_cuda(const char* op, const char* what, cudaError_t status);

// Makes a device the current one during its lifetime: for torch, and for this library's own,
// statically linked CUDA runtime.
class CurrentDevice {
 public:
  explicit CurrentDevice(int32_t device);

#if !defined(DYNEMB_EMULATED)
 private:
  torch::stable::accelerator::DeviceGuard guard_;
#endif
};

// The device of a call: its guard, current stream and error word. Construct it first in every op;
// it also raises errors that kernels of earlier calls have reported.
class Call : public CallContext {
 public:
  // The op runs on the device of `owner`; all other tensors must be there too.
  Call(const char* op, const char* owner_name, const Tensor& owner);
  // On a device's current stream, for ops without a tensor.
  Call(const char* op, int32_t device);

  int32_t device;
  cudaStream_t stream;
  ErrorWord* error;  // device address
  int32_t op_number;

  // The same call on another stream.
  Call on_stream(cudaStream_t other) const;
  bool capturing() const;
  void synchronize() const;

  Tensor empty(const std::vector<int64_t>& size, ScalarType dtype) const;

  // Sets memory to a byte value.
  void fill(void* data, int value, int64_t bytes) const;
  void copy(void* to, const void* from, int64_t bytes) const;  // within the device
  // Words of the device; waits for them. `what`: "reading ...", for the error of a failure.
  std::vector<int64_t> read(const char* what, const int64_t* words, int64_t count) const;

  // Runs `kernel` with one thread for each of `threads`, at least one block. `block` 0: tuning's.
  template <class... P, class... A>
  void launch(void (*kernel)(P...), int64_t threads, int64_t block, A&&... arguments) const {
    const int64_t block_size = block > 0 ? block : tuning(device).block;
    const int64_t blocks = std::max<int64_t>((threads + block_size - 1) / block_size, 1);
    DYNEMB_CHECK(blocks <= INT32_MAX, "dynemb::", op, ": ", threads,
                 " threads are more than a GPU can run: split the batch");
    run(kernel, blocks, block_size, std::forward<A>(arguments)...);
  }

  // Runs `kernel` with at most as many threads as the device holds at once: for kernels that loop
  // over `work` items; the device may know a smaller number.
  template <class... P, class... A>
  void launch_strided(void (*kernel)(P...), int64_t work, A&&... arguments) const {
    const Tuning& t = tuning(device);
    const int64_t most = t.multiprocessors * t.blocks_per_sm;
    const int64_t blocks = std::min(most, (work + t.block - 1) / t.block);
    run(kernel, std::max<int64_t>(blocks, 1), t.block, std::forward<A>(arguments)...);
  }

 private:
  template <class... P, class... A>
  void run(void (*kernel)(P...), int64_t blocks, int64_t block, A&&... arguments) const {
    const dim3 grid_size(static_cast<unsigned>(blocks));
    const dim3 block_size(static_cast<unsigned>(block));
    std::tuple<std::decay_t<P>...> values(static_cast<P>(arguments)...);
#if defined(DYNEMB_EMULATED)
    emulator::launch(stream, grid_size, block_size, kernel, std::move(values));
#else
    void* pointers[sizeof...(P) + 1];
    collect(values, pointers, std::index_sequence_for<P...>{});
    check_cuda(op, "launching a kernel",
               cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid_size, block_size,
                                pointers, 0, stream));
#endif
  }
  template <class Values, size_t... I>
  static void collect(Values& values, void** pointers, std::index_sequence<I...>) {
    ((pointers[I] = &std::get<I>(values)), ...);
  }

  CurrentDevice guard_;
};

// Scratch memory of a call: parts are added, then one allocation holds them all. Torch's allocator
// gives the memory back to the stream when this object ends.
class Scratch {
 public:
  template <class T>
  struct Part {
    int64_t offset;
  };

  template <class T>
  Part<T> add(int64_t count) {
    const int64_t offset = bytes_;
    bytes_ += (count * static_cast<int64_t>(sizeof(T)) + kAlignment - 1) / kAlignment * kAlignment;
#if defined(EMULATOR_BOUNDS)
    bytes_ += kAlignment;
    gaps_.push_back({offset + count * static_cast<int64_t>(sizeof(T)), bytes_});
#endif
    return {offset};
  }
  void allocate(const Call& call) {
    memory_ = call.empty({std::max<int64_t>(bytes_, 1)}, ScalarType::Byte);
    data_ = static_cast<char*>(memory_.data_ptr());
#if defined(EMULATOR_BOUNDS)
    for (const auto& [begin, end] : gaps_) emulator::forbid(data_ + begin, data_ + end);
#endif
  }
  template <class T>
  T* get(Part<T> part) const {
    return reinterpret_cast<T*>(data_ + part.offset);
  }

 private:
  static constexpr int64_t kAlignment = 256;
  int64_t bytes_ = 0;
  Tensor memory_;
  char* data_ = nullptr;
#if defined(EMULATOR_BOUNDS)
  std::vector<std::pair<int64_t, int64_t>> gaps_;  // after each part: no kernel may touch them
#endif
};

// Copies small host values (feature tables, pointers) to the device as kernel arguments: host
// memory need not outlive the call, and a captured graph keeps them.
void upload_words(const Call& call, const std::vector<int64_t>& words, int64_t* to);

}  // namespace dynemb::cuda
