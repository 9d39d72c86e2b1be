#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "cuda/runtime/used_streams.h"

namespace dynemb::cuda {
namespace {

std::mutex mutex;
std::map<int32_t, std::set<cudaStream_t>>& used() {
  static auto* streams = new std::map<int32_t, std::set<cudaStream_t>>();  // outlives tensors
  return *streams;
}

bool is_captured(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return cudaStreamIsCapturing(stream, &status) != cudaSuccess ||
         status != cudaStreamCaptureStatusNone;
}

}  // namespace

void note_stream(int32_t device, cudaStream_t stream) {
  thread_local std::pair<int32_t, cudaStream_t> last{-1, nullptr};
  if (last == std::pair(device, stream)) return;
  const std::lock_guard<std::mutex> lock(mutex);
  used()[device].insert(stream);
  last = {device, stream};
}

bool wait_for_used_streams(int32_t device) {
  std::set<cudaStream_t> streams;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    streams = used()[device];
  }
  bool waited = true;
  for (cudaStream_t stream : streams) waited = waited && !is_captured(stream);
  for (cudaStream_t stream : streams)
    waited = waited && cudaStreamSynchronize(stream) == cudaSuccess;
  if (!waited) cudaGetLastError();
  return waited;
}

}  // namespace dynemb::cuda
