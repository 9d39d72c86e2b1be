#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>

#include "core/runtime/error_class.h"
#include "cuda/runtime/device.cuh"
#include "cuda/runtime/launch.h"
#include "cuda/runtime/used_streams.h"

#if !defined(DYNEMB_EMULATED)
// Missing in torch's CPU build, against which the library is linked; never called there.
#pragma weak aoti_torch_get_current_cuda_stream
#endif

namespace dynemb::cuda {
namespace {

// One thread per word; 8 bytes written each. Arguments lie in constant memory.
constexpr int kWordsPerLaunch = 480;
struct Words {
  int64_t value[kWordsPerLaunch];
};
__global__ void write_words(const __grid_constant__ Words words, int64_t count, int64_t* to) {
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) to[i] = words.value[i];
}

// Derived, not measured: enough warps to hide random accesses at up to 128 registers a thread, and
// two waves of blocks where more multiprocessors share the memory.
Tuning tuning_of(int major, int multiprocessors) {
  switch (major) {
    case 8:  // A100
      return {256, 8, multiprocessors};
    case 9:  // H100, H200
      return {256, 16, multiprocessors};
    default:  // B200 and later
      return {256, 16, multiprocessors};
  }
}

constexpr int kMaxDevices = 64;

struct DeviceState {
  std::once_flag once;
  Tuning tuning{};
  ErrorWord* host_error = nullptr;
  ErrorWord* device_error = nullptr;
};
DeviceState& device_state(const char* op, int32_t device) {
  static DeviceState states[kMaxDevices];
  DYNEMB_CHECK(device >= 0 && device < kMaxDevices, "dynemb::", op, ": device ", device,
               ", expected fewer than ", kMaxDevices, " devices");
  DeviceState& state = states[device];
  std::call_once(state.once, [&] {
    // may happen during the capture of a graph, but is not captured
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    check_cuda(op, "leaving the capture mode", cudaThreadExchangeStreamCaptureMode(&mode));
    int major = 0;
    int multiprocessors = 0;
    check_cuda(op, "asking for the architecture",
               cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    check_cuda(op, "asking for the multiprocessors",
               cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
    void* host = nullptr;
    void* mapped = nullptr;
    check_cuda(
        op, "allocating the error word",
        cudaHostAlloc(&host, sizeof(ErrorWord), cudaHostAllocMapped | cudaHostAllocPortable));
    check_cuda(op, "mapping the error word", cudaHostGetDevicePointer(&mapped, host, 0));
    check_cuda(op, "returning to the capture mode", cudaThreadExchangeStreamCaptureMode(&mode));
    state.host_error = static_cast<ErrorWord*>(host);
    *state.host_error = 0;
    state.device_error = static_cast<ErrorWord*>(mapped);
    state.tuning = tuning_of(major, multiprocessors);
  });
  return state;
}

// Ops get numbers in the order of their first call, so that a kernel can identify one in 10 bits.
std::mutex names_mutex;
std::vector<std::string>& op_names() {
  static auto* names = new std::vector<std::string>();
  return *names;
}
int32_t number_of(const char* op) {
  const std::lock_guard<std::mutex> lock(names_mutex);
  auto& names = op_names();
  for (size_t i = 0; i < names.size(); ++i) {
    if (names[i] == op) return static_cast<int32_t>(i);
  }
  names.emplace_back(op);
  return static_cast<int32_t>(names.size() - 1);
}

std::string error_text(ErrorWord word) {
  const std::string value = std::to_string(error_value(word));
  switch (error_code(word)) {
    case kErrorOffsetsStart:
      return "offsets[0] is " + value + ", expected 0";
    case kErrorOffsetsDecrease:
      return "offsets[" + value + "] is less than the offset before it: offsets must not decrease";
    case kErrorOffsetsEnd:
      return "the last offset is " + value +
             ", expected the number of ids: offsets have one element per bag and that number at "
             "the end";
    case kErrorHandle:
      return "a handle names row " + value +
             ", which the table does not have: handles must come from find or find_or_insert_";
    case kErrorBuckets:
      return "table " + value +
             " has no room for more buckets; no id was inserted: create the table with a larger "
             "max_rows, or erase ids";
    case kErrorRows:
      return "row slab " + value +
             " has no room for more rows; no id was inserted: create the table with a larger "
             "max_rows, or erase ids";
    case kErrorMemory:
      return "table or row slab " + value +
             " needs more memory than has been mapped for it; no id was inserted: call "
             "optimizer.step() after every replay of a captured step";
    case kErrorUpdated:
      return "the rows were updated between this lookup's forward (update " + value +
             ") and its backward, so its gradients no longer fit them, and nothing was updated. Do "
             "not look a table up twice before a backward, nor run backward twice: pass all "
             "features of a table to one call, or use split mode (split=True, then one "
             "module.optimizer.step()); where gradients are to come late, give the optimizer "
             "delayed_gradients=\"apply\"";
    case kErrorEntry:
      return "entry " + value +
             " names a row or table that does not exist, and was skipped; expected what "
             "reduce_grad "
             "returned";
    case kErrorCount:
      return "counts[" + value + "] is more than handles, ids, tables or gradients hold";
    case kErrorTableUpdated:
      return "entry " + value +
             " belongs to a table that updated_tables lacks, and was skipped: give all tables of "
             "the lookup";
    case kErrorFeatureDim:
      return "feature_dims[" + value + "] is not the dim of the feature's table";
    case kErrorFull:
      return "table " + value +
             " has no room for the new ids of a call; no id was inserted: give it a larger "
             "capacity "
             "or budget, remove ids, or choose another on_full than \"error\"";
    case kErrorNonFinite:
      return "a gradient of table " + value +
             " has NaN or infinity, and non_finite is 'raise': no row has been updated";
    case kErrorPending:
      return "row slab " + value +
             " has no room for the gradients of a lookup, and none of them were added: call "
             "optimizer.step() or zero_grad() more often, after every replay of a captured step";
    case kErrorWeightsUpdated:
      return "the rows were updated between this lookup's forward (update " + value +
             ") and its backward, so the gradients of per_sample_weights no longer fit them, and "
             "no gradient was added: call backward before optimizer.step()";
    case kErrorListStart:
      return "offsets[" + value + "] does not begin with 0";
    case kErrorListDecrease:
      return "offsets[" + value + "] decreases: offsets must not decrease";
    case kErrorListEnd:
      return "offsets[" + value +
             "] does not end with the number of its values: offsets have that number at their end";
    case kErrorEmptyTable:
      return "table " + value + " is empty, but samples need an id: train it first";
    case kErrorPosition:
      return "positions has " + value + ", which is out of the range of rows, and was left out";
    case kErrorRowLength:
      return "offsets[" + value +
             "] has a row that is longer than the dense dimension, and was cut";
    default:
      return "unknown error " + std::to_string(error_code(word));
  }
}

// The mark of an error's class, see core/runtime/error_class.h.
const char* error_class(ErrorWord word) {
  switch (error_code(word)) {
    case kErrorBuckets:
    case kErrorRows:
    case kErrorMemory:
    case kErrorFull:
    case kErrorPending:
      return kNoRoomError;
    default:
      return "";
  }
}

void raise_reported(const char* op, DeviceState& state) {
  auto* word = reinterpret_cast<std::atomic<ErrorWord>*>(state.host_error);
  if (word->load(std::memory_order_relaxed) == 0) return;
  const ErrorWord reported = word->exchange(0);
  std::string name;
  {
    const std::lock_guard<std::mutex> lock(names_mutex);
    const auto number = static_cast<size_t>(error_op(reported));
    name = number < op_names().size() ? op_names()[number] : "an op";
  }
  DYNEMB_CHECK(false, "dynemb::", name, ": ", error_text(reported),
               " (found by the GPU in an earlier call, reported by ", op, ")",
               error_class(reported));
}

int32_t device_of(const char* op, const char* name, const Tensor& tensor) {
#if defined(DYNEMB_EMULATED)
  DYNEMB_CHECK(tensor.is_cpu(), "dynemb::", op, ": ", name, " is not on the emulated device");
  return 0;
#else
  DYNEMB_CHECK(tensor.is_cuda(), "dynemb::", op, ": ", name,
               " is on the CPU, but another argument is on a GPU: move the table with .to(), or "
               "the other arguments to the CPU");
  return tensor.get_device_index();
#endif
}

// Selects a GPU's error words: raise_device_errors has no tensor argument.
void raise_device_errors(int64_t device) {
  const char* op = "raise_device_errors";
  raise_reported(op, device_state(op, static_cast<int32_t>(device)));
}

}  // namespace

#if defined(DYNEMB_EMULATED)
CurrentDevice::CurrentDevice(int32_t) {}
#else
CurrentDevice::CurrentDevice(int32_t device) : guard_(device) {
  check_cuda("CurrentDevice", "selecting the device", cudaSetDevice(device));
}
#endif

const Tuning& tuning(int32_t device) { return device_state("tuning", device).tuning; }

void check_cuda(const char* op, const char* what, cudaError_t status) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // otherwise the next call, perhaps torch's, would report it again
  DYNEMB_CHECK(false, "dynemb::", op, ": CUDA failed in ", what, ": ", cudaGetErrorString(status),
               " (", cudaGetErrorName(status), ")");
}

Call::Call(const char* op_name, const char* owner_name, const Tensor& owner)
    : Call(op_name, device_of(op_name, owner_name, owner)) {}

Call::Call(const char* op_name, int32_t device_index)
#if defined(DYNEMB_EMULATED)
    : CallContext(op_name, kOnCpu),
#else
    : CallContext(op_name, device_index),
#endif
      device(device_index),
      stream(nullptr),
      error(nullptr),
      op_number(number_of(op_name)),
      guard_(device_index) {
#if defined(DYNEMB_EMULATED)
  stream = emulator_current_stream();
#else
  DYNEMB_CHECK(&aoti_torch_get_current_cuda_stream != nullptr, "dynemb::", op,
               ": this torch has no CUDA: install a CUDA build of torch");
  void* current = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &current));
  stream = static_cast<cudaStream_t>(current);
#endif
  note_stream(device, stream);
  DeviceState& state = device_state(op, device);
  error = state.device_error;
  raise_reported(op, state);
}

Call Call::on_stream(cudaStream_t other) const {
  Call result(op, device);
  result.stream = other;
  note_stream(device, other);
  return result;
}

bool Call::capturing() const {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_cuda(op, "asking whether the stream is captured", cudaStreamIsCapturing(stream, &status));
  return status == cudaStreamCaptureStatusActive;
}

void Call::synchronize() const {
  check_cuda(op, "waiting for the stream", cudaStreamSynchronize(stream));
}

Tensor Call::empty(const std::vector<int64_t>& size, ScalarType dtype) const {
#if defined(DYNEMB_EMULATED)
  const torch::stable::Device where(torch::headeronly::DeviceType::CPU);
#else
  const torch::stable::Device where(torch::headeronly::DeviceType::CUDA, device);
#endif
  try {
    Tensor result = torch::stable::empty(size, dtype, std::nullopt, where);
#if defined(DYNEMB_EMULATED)
    emulator::keep(stream, std::make_shared<Tensor>(result));  // as torch's allocator of a GPU
#endif
    return result;
  } catch (const std::exception&) {
    // torch's message is lost in its C interface
    int64_t bytes = dtype == ScalarType::Byte || dtype == ScalarType::Bool ? 1
                    : dtype == ScalarType::Long                            ? 8
                                                                           : 4;
    for (const int64_t n : size) bytes *= n;
    size_t free_bytes = 0;
    size_t total = 0;
    check_cuda(op, "asking for free memory", cudaMemGetInfo(&free_bytes, &total));
    DYNEMB_CHECK(false, "dynemb::", op, ": out of GPU memory: the call needs ", (bytes >> 20) + 1,
                 " MiB for its results or scratch memory, but the device has ", free_bytes >> 20,
                 " MiB left. Use smaller batches, call "
                 "torch.cuda.empty_cache(), or use a GPU with more memory",
                 kDeviceMemoryError);
  }
}

void Call::fill(void* data, int value, int64_t bytes) const {
  if (bytes == 0) return;
  check_cuda(op, "clearing memory",
             cudaMemsetAsync(data, value, static_cast<size_t>(bytes), stream));
}

void Call::copy(void* to, const void* from, int64_t bytes) const {
  if (bytes == 0) return;
  check_cuda(
      op, "copying memory",
      cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, stream));
}

std::vector<int64_t> Call::read(const char* what, const int64_t* words, int64_t count) const {
  std::vector<int64_t> read(static_cast<size_t>(count));
  check_cuda(op, what,
             cudaMemcpyAsync(read.data(), words, read.size() * sizeof(int64_t),
                             cudaMemcpyDeviceToHost, stream));
  synchronize();
  return read;
}

void upload_words(const Call& call, const std::vector<int64_t>& words, int64_t* to) {
  const int64_t total = static_cast<int64_t>(words.size());
  for (int64_t begin = 0; begin < total; begin += kWordsPerLaunch) {
    const int64_t count = std::min<int64_t>(kWordsPerLaunch, total - begin);
    Words chunk;
    std::copy(words.begin() + begin, words.begin() + begin + count, chunk.value);
    call.launch(write_words, 1, 128, chunk, count, to + begin);
  }
}

}  // namespace dynemb::cuda

DYNEMB_IMPLEMENT_DEVICELESS_OPS(m) {
  m.impl("raise_device_errors", TORCH_BOX(&dynemb::cuda::raise_device_errors));
}
