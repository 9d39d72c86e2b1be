#include <utility>

#include "cuda/runtime/stream_order.h"

namespace dynemb::cuda {
namespace {

// The capture of a stream; 0: none.
cudaError_t capture_of(cudaStream_t stream, unsigned long long* capture) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  const cudaError_t error = cudaStreamGetCaptureInfo(stream, &status, &id);
  *capture = status == cudaStreamCaptureStatusActive ? id : 0;
  return error;
}

}  // namespace

StreamOrder::StreamOrder(const Call& call) {
  for (Last* last : {&eager_, &captured_}) {
    check_cuda(call.op, "creating an event",
               cudaEventCreateWithFlags(&last->event, cudaEventDisableTiming));
  }
}

StreamOrder::~StreamOrder() {
  for (const Last* last : {&eager_, &captured_}) {
    if (last->event != nullptr && cudaEventDestroy(last->event) != cudaSuccess) cudaGetLastError();
  }
}

void StreamOrder::wait(const Call& call) const {
  unsigned long long capture = 0;
  check_cuda(call.op, "asking for the capture of the stream", capture_of(call.stream, &capture));
  const Last& last = capture == 0 ? eager_ : captured_;
  if (!last.recorded || last.capture != capture || last.stream == call.stream) return;
  check_cuda(call.op, "waiting for a call on another stream",
             cudaStreamWaitEvent(call.stream, last.event, 0));
}

void StreamOrder::record(const Call& call) noexcept {
  unsigned long long capture = 0;
  if (capture_of(call.stream, &capture) != cudaSuccess) cudaGetLastError();
  Last& last = capture == 0 ? eager_ : captured_;
  last.stream = call.stream;
  last.capture = capture;
  last.recorded = cudaEventRecord(last.event, call.stream) == cudaSuccess;
  if (!last.recorded) cudaGetLastError();
  const bool replays = captured_.recorded && capture == 0;
  if (replays && steps_.has_value() && *steps_ != call.stream &&
      cudaStreamWaitEvent(*steps_, last.event, 0) != cudaSuccess) {
    cudaGetLastError();
  }
}

InOrder::InOrder(const Call& call, std::shared_ptr<StreamOrder> order)
    : call_(call), order_(std::move(order)) {
  if (order_ == nullptr) return;
  lock_ = std::unique_lock<std::mutex>(order_->mutex_);
  order_->wait(call);
}

InOrder::~InOrder() {
  if (order_ != nullptr) order_->record(call_);
}

}  // namespace dynemb::cuda
