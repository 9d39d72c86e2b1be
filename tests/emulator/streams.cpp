// Streams, events and captures.
#include "emulator/streams.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

struct CUstream_st {
  std::deque<std::function<void()>> work;  // not done yet
  uint64_t issued = 0;
  uint64_t done = 0;
  std::vector<std::shared_ptr<void>> used;
  uint64_t capture = 0;  // that it has joined
  uint64_t joined = 0;   // the capture in which the default stream has waited for it
};
struct EmulatorGraph {
  std::vector<std::function<void()>> work;  // in the order of its calls
  std::vector<std::shared_ptr<void>> used;
};
struct CUevent_st {
  cudaStream_t stream = nullptr;
  uint64_t position = 0;  // of the work of the stream before it
  uint64_t capture = 0;   // in which it was recorded
};

namespace emulator {
namespace {

enum WaitKind : int {
  kWaitDevice = 0,
  kWaitStream = 1,
  kWaitEvent = 2,
  kQueryStream = 3,
  kQueryEvent = 4,
  kStreamWaits = 5,
  kWaitKinds = 6
};
enum Lazy : int { kAtOnce = 0, kOldestFirst = 1, kNewestFirst = 2 };

thread_local cudaError_t last_error = cudaSuccess;
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
thread_local cudaStream_t current = nullptr;

std::atomic<bool> capturing{false};            // the default stream, by this thread
std::atomic<bool> capturing_elsewhere{false};  // another stream, by another thread
std::atomic<uint64_t> captures{0};             // so far
std::shared_ptr<EmulatorGraph> graph;          // of the last capture
std::atomic<long long> forbidden_calls{0};     // each would have invalidated the capture
std::atomic<long long> faulting_launch{0};     // how many are to come, and 1; 1: it has faulted
std::atomic<long long> calls_behind{0};        // insertions that the device still has to do

// Calls in which the host or a stream waits, or the host asks whether something is done.
std::atomic<long long> waits[kWaitKinds];
std::atomic<long long> ignored_waits[kWaitKinds];  // the number of the call that does nothing

std::atomic<int> lazy{kAtOnce};
std::recursive_mutex mutex;
std::vector<cudaStream_t>& streams() {
  static auto* all = new std::vector<cudaStream_t>();
  return *all;
}

// Counts a wait; false: the test has removed it.
bool counts(WaitKind kind) { return ++waits[kind] != ignored_waits[kind]; }

// Work before `position` of a stream, in order.
void run_until(cudaStream_t stream, uint64_t position) {
  if (stream == nullptr) return;
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  while (stream->done < position && !stream->work.empty()) {
    const std::function<void()> next = std::move(stream->work.front());
    stream->work.pop_front();
    ++stream->done;  // what it waits for comes before it
    next();
  }
}
void run_all() {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  std::vector<cudaStream_t> all = streams();
  if (lazy == kNewestFirst) std::reverse(all.begin(), all.end());
  for (cudaStream_t stream : all) run_until(stream, stream->issued);
}

uint64_t capture_of(cudaStream_t stream) {
  if (!capturing) return 0;
  return stream == nullptr || stream->capture == captures ? captures.load() : 0;
}
cudaError_t forbidden(cudaError_t error) {
  ++forbidden_calls;
  return returned(error);
}

}  // namespace

bool runs_at_once(cudaStream_t stream) { return stream == nullptr || lazy == kAtOnce; }

void queue(cudaStream_t stream, std::function<void()> work) {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  stream->work.push_back(std::move(work));
  ++stream->issued;
}
void finish(cudaStream_t stream) {
  if (stream != nullptr) run_until(stream, stream->issued);
}
void keep(cudaStream_t stream, std::shared_ptr<void> used) {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  if (capture_of(stream) != 0) graph->used.push_back(used);
  if (!runs_at_once(stream)) stream->used.push_back(std::move(used));
}
bool is_captured(cudaStream_t stream) { return capture_of(stream) != 0; }
void record(std::function<void()> work) {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  graph->work.push_back(std::move(work));
}

cudaError_t returned(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}
cudaError_t faulted() {
  if (faulting_launch != 1) return cudaSuccess;
  return returned(cudaErrorIllegalAddress);
}
bool faults_now() {
  const long long launch = faulting_launch;
  if (launch <= 1) return false;
  faulting_launch = launch - 1;
  return launch == 2;
}
cudaError_t unless_captured() {
  if (const cudaError_t error = faulted()) return error;
  const bool refused =
      (capturing || capturing_elsewhere) && capture_mode != cudaStreamCaptureModeRelaxed;
  return refused ? forbidden(cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}

}  // namespace emulator

using namespace emulator;

extern "C" {

void emulator_set_capturing(int on) {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  if (on != 0 && !capturing) {
    ++captures;
    graph = std::make_shared<EmulatorGraph>();
  }
  if (on == 0 && capturing) {
    for (cudaStream_t stream : streams()) {
      // a forked stream that the capturing stream has not waited for
      if (capture_of(stream) != 0 && stream->joined != captures) ++forbidden_calls;
    }
  }
  capturing = on != 0;
}
EmulatorGraph* emulator_take_graph() {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  return new EmulatorGraph(std::move(*graph));
}
void emulator_replay(const EmulatorGraph* captured) {
  for (const std::function<void()>& work : captured->work) run(current, work);
}
void emulator_end_graph(EmulatorGraph* captured) {
  run_all();
  delete captured;
}
void emulator_set_capturing_elsewhere(int on) { capturing_elsewhere = on != 0; }
long long emulator_forbidden_calls() { return forbidden_calls; }
void emulator_fault(long long launch) {
  faulting_launch = launch == 0 ? 0 : launch + 1;
  last_error = cudaSuccess;
}
void emulator_set_calls_behind(long long calls) { calls_behind = calls; }
long long emulator_calls_behind() { return calls_behind; }
long long emulator_waits(int kind) { return waits[kind]; }
void emulator_ignore_wait(int kind, long long number) {
  ignored_waits[kind] = number == 0 ? 0 : waits[kind] + number;
}
void emulator_set_lazy(int order) {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  run_all();
  lazy = order;
  for (cudaStream_t stream : streams()) stream->used.clear();
}
void emulator_set_current_stream(cudaStream_t stream) { current = stream; }
cudaStream_t emulator_current_stream() { return current; }
int emulator_is_capturing() { return capture_of(current) != 0 ? 1 : 0; }
cudaStream_t emulator_new_stream() {
  cudaStream_t stream = nullptr;
  cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  return stream;
}
void emulator_wait_stream(cudaStream_t waiting, cudaStream_t waited_for) {
  CUevent_st event;
  cudaEventRecord(&event, waited_for);
  cudaStreamWaitEvent(waiting, &event, 0);
}

cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = faulted();
  return error;
}
cudaError_t cudaPeekAtLastError() { return last_error; }

cudaError_t cudaDeviceSynchronize() {
  const bool waiting = counts(kWaitDevice);
  if (const cudaError_t error = faulted()) return error;
  // a device includes all of its streams, whatever the mode and the thread
  if (capturing || capturing_elsewhere) return forbidden(cudaErrorStreamCaptureUnsupported);
  if (waiting) run_all();
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  if (const cudaError_t error = faulted()) return error;
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  *stream = new CUstream_st();
  streams().push_back(*stream);
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  run_until(stream, stream->issued);
  streams().erase(std::find(streams().begin(), streams().end(), stream));
  delete stream;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  const bool waiting = counts(kWaitStream);
  if (const cudaError_t error = faulted()) return error;
  if (capture_of(stream) != 0) return returned(cudaErrorStreamCaptureUnsupported);
  if (const cudaError_t error = unless_captured()) return error;
  if (waiting && stream != nullptr) run_until(stream, stream->issued);
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  ++waits[kQueryStream];
  if (const cudaError_t error = faulted()) return error;
  if (calls_behind > 0) {
    --calls_behind;
    return returned(cudaErrorNotReady);
  }
  if (const cudaError_t error = unless_captured()) return error;
  if (stream == nullptr || stream->done == stream->issued) return cudaSuccess;
  run_until(stream, stream->done + 1);
  return returned(cudaErrorNotReady);
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  const bool waiting = counts(kStreamWaits);
  if (const cudaError_t error = faulted()) return error;
  const uint64_t capture = capture_of(stream);
  if (event->capture != capture) {
    if (capture != 0) return forbidden(cudaErrorStreamCaptureIsolation);
    if (event->capture != captures || !capturing) return forbidden(cudaErrorCapturedEvent);
    stream->capture = event->capture;
  }
  if (!waiting || event->stream == nullptr) return cudaSuccess;
  if (stream == nullptr && capture != 0) event->stream->joined = capture;
  if (runs_at_once(stream)) {
    run_until(event->stream, event->position);
  } else {  // a graph has its work in the order of the calls
    queue(stream,
          [from = event->stream, position = event->position] { run_until(from, position); });
  }
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return cudaStreamGetCaptureInfo(stream, status);
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id) {
  if (const cudaError_t error = faulted()) return error;
  const uint64_t capture = capture_of(stream);
  *status = capture != 0 ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  if (id != nullptr && capture != 0) *id = capture;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(capture_mode, *mode);
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  if (const cudaError_t error = faulted()) return error;
  *event = new CUevent_st();
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  if (const cudaError_t error = faulted()) return error;
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  *event = {stream, stream == nullptr ? 0 : stream->issued, capture_of(stream)};
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  ++waits[kQueryEvent];
  if (event->capture != 0) return forbidden(cudaErrorCapturedEvent);
  if (const cudaError_t error = unless_captured()) return error;
  if (event->stream == nullptr || event->stream->done >= event->position) return cudaSuccess;
  run_until(event->stream, event->stream->done + 1);
  return returned(cudaErrorNotReady);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  const bool waiting = counts(kWaitEvent);
  if (event->capture != 0) return forbidden(cudaErrorCapturedEvent);
  if (const cudaError_t error = unless_captured()) return error;
  if (waiting) run_until(event->stream, event->position);
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return faulted();
}

}  // extern "C"
