// Streams of the emulator. Work is done at once; in the lazy mode, work of other streams than the
// default one is done only when something waits for it, as late as a GPU may do it.
#pragma once

#include <functional>
#include <memory>
#include <tuple>
#include <utility>

#include "emulator/launch.h"
#include "emulator/runtime_api.h"

namespace emulator {

bool runs_at_once(cudaStream_t stream);
void queue(cudaStream_t stream, std::function<void()> work);
// Does all work of a stream.
void finish(cudaStream_t stream);
// Keeps what work of the stream may still use: until the lazy mode ends, and as long as a graph
// that captures the stream.
void keep(cudaStream_t stream, std::shared_ptr<void> used);

bool is_captured(cudaStream_t stream);
// Adds work to the graph of the running capture.
void record(std::function<void()> work);

// The error of a kernel that has faulted: from then on every call fails with it.
cudaError_t faulted();
// Whether the test lets this launch fault.
bool faults_now();

// Does work in the order of a stream. In a capture it is also recorded, and so the capture is the
// first replay.
template <class F>
cudaError_t run(cudaStream_t stream, F work) {
  if (const cudaError_t error = faulted()) return error;
  if (is_captured(stream)) record(work);
  if (runs_at_once(stream)) {
    work();
  } else {
    queue(stream, std::move(work));
  }
  return cudaSuccess;
}

template <class... P>
cudaError_t launch(cudaStream_t stream, dim3 grid, dim3 block, void (*kernel)(P...),
                   std::tuple<std::decay_t<P>...> arguments) {
  if (faults_now()) return cudaSuccess;  // as of all errors of kernels, a later call says so
  return run(stream, [grid, block, kernel, arguments = std::move(arguments)]() mutable {
    run_kernel(grid, block, [&] { std::apply(kernel, arguments); });
  });
}

// The status of a call; an error is also the last one.
cudaError_t returned(cudaError_t error);
// For calls that a capture forbids, of this thread or in the global mode of another one, unless
// this thread has asked for the relaxed mode.
cudaError_t unless_captured();

}  // namespace emulator
