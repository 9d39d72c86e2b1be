// Kernels for tests/cuda/test_emulator.py, written like those of csrc/cuda.
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cub/cub.cuh>
#include <vector>

namespace {

template <class... P, class... A>
void launch(void (*kernel)(P...), dim3 blocks, dim3 threads, A... arguments) {
  emulator::run_kernel(blocks, threads, [&] { kernel(static_cast<P>(arguments)...); });
}

__global__ void reduce_blocks(const int64_t* input, int64_t* sums, int64_t* largest) {
  __shared__ int64_t values[128];
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  values[threadIdx.x] = input[i];
  for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) values[threadIdx.x] += values[threadIdx.x + half];
  }
  const int odd = __syncthreads_count(input[i] % 2 != 0);
  if (threadIdx.x == 0) sums[blockIdx.x] = values[0] + odd;
  atomicMax(reinterpret_cast<long long*>(largest), static_cast<long long>(input[i]));
}

// Sums over groups of 8 lanes, each with a mask and a number of rounds of its own.
__global__ void sum_groups(const float* input, float* sums, unsigned* votes) {
  const unsigned mask = 0xffu << (threadIdx.x & 24u);
  const unsigned group = threadIdx.x / 8;
  float total = 0.0f;
  for (unsigned round = 0; round <= group; ++round) {
    float value = input[threadIdx.x];
    for (int distance = 4; distance > 0; distance /= 2) {
      value += __shfl_xor_sync(mask, value, distance, 8);
    }
    total += __shfl_sync(mask, value, 3, 8);
  }
  sums[threadIdx.x] = total;
  __syncwarp();
  const int below = __shfl_up_sync(0xffffffffu, static_cast<int>(threadIdx.x), 1);
  const int above = __shfl_down_sync(0xffffffffu, static_cast<int>(threadIdx.x), 1, 8);
  const bool ends =
      below == static_cast<int>(threadIdx.x) || above == static_cast<int>(threadIdx.x);
  votes[threadIdx.x] = __ballot_sync(0xffffffffu, ends) ^
                       __match_any_sync(0xffffffffu, static_cast<long long>(threadIdx.x % 4));
}

// The order in which threads get here; what they find must not depend on it.
__global__ void take_tickets(unsigned long long* next, int64_t* tickets) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  tickets[i] = static_cast<int64_t>(atomicAdd(next, 1ULL));
}

// A read and a write with an atomic operation between them: another thread may come in between.
__global__ void lose_updates(int* counter, int* other) {
  const int seen = *counter;
  atomicAdd(other, 1);
  *counter = seen + 1;
}

__global__ void sync_half_of_block() {
  if (threadIdx.x < 16) __syncthreads();
}
__global__ void sync_half_of_warp() {
  if (threadIdx.x < 16) __syncwarp();
}
__global__ void sync_at_two_places() {
  if (threadIdx.x < 16) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}
__global__ void sync_outside_mask() { __ballot_sync(0xfffffffeu, 1); }
__global__ void load_unaligned(const float* from, float* to) {
  to[threadIdx.x] = reinterpret_cast<const float4*>(from + 1)->x;
}

// One block writes, a later one reads if it sees the flag.
__global__ void pass_message(int* data, int* flag, int* seen, bool writer_fences,
                             bool reader_fences) {
  if (blockIdx.x == 0) {
    *data = 1;
    if (writer_fences) __threadfence();
    atomicExch(flag, 1);
  } else if (atomicAdd(flag, 0) != 0) {
    if (reader_fences) __threadfence();
    *seen = *data;
  }
}
// Lanes read what their neighbours have written.
__global__ void read_neighbours(int* sums, bool synchronizes) {
  __shared__ int values[32];
  const int lane = static_cast<int>(threadIdx.x);
  values[lane] = lane;
  if (synchronizes) {
    __syncwarp();
  } else {
    __shfl_xor_sync(0xffffffffu, lane, 1);
  }
  sums[blockIdx.x * 32 + lane] = values[lane ^ 1];
}
__global__ void write_one_word(int* word, int how) {
  if (how == 0) *word = 1;
  if (how == 1) *const_cast<volatile int*>(word) = 1;
  if (how == 2) __stcg(word, 1);
  if (how == 3) atomicExch(word, 1);
}
__global__ void write_shared(int index, int* sum) {
  __shared__ int values[32];
  volatile int* first = values;  // the compiler would see an index beyond the array
  first[index] = 1;
  *sum = values[0];
}

template <class F>
bool driver_function(const char* name, F** function) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult status;
  if (cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &status) !=
          cudaSuccess ||
      status != cudaDriverEntryPointSuccess) {
    return false;
  }
  *function = reinterpret_cast<F*>(found);
  return true;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void test_reduce_blocks(const int64_t* input, int64_t* sums, int64_t* largest, int blocks) {
  launch(reduce_blocks, blocks, 128, input, sums, largest);
}
EXPORT void test_sum_groups(const float* input, float* sums, unsigned* votes) {
  launch(sum_groups, 1, 32, input, sums, votes);
}
EXPORT void test_take_tickets(int64_t* tickets, int blocks, int threads) {
  unsigned long long next = 0;
  launch(take_tickets, blocks, threads, &next, tickets);
}
EXPORT int test_lost_updates(int threads) {
  int counter = 0;
  int other = 0;
  launch(lose_updates, 1, threads, &counter, &other);
  return other - counter;
}
EXPORT void test_bug(int which) {
  alignas(16) float memory[64] = {};
  switch (which) {
    case 0:
      return launch(sync_half_of_block, 1, 32);
    case 1:
      return launch(sync_half_of_warp, 1, 32);
    case 2:
      return launch(sync_at_two_places, 1, 32);
    case 3:
      return launch(sync_outside_mask, 1, 32);
    case 4:
      return launch(load_unaligned, 1, 32, memory, memory);
  }
}

// Cases of a word that several threads access; the first ones are races.
EXPORT void test_order(int which) {
  int words[4 + 64] = {};
  switch (which) {
    case 0:
      return launch(write_one_word, 2, 32, words, 0);
    case 1:
      return launch(pass_message, 2, 1, words, words + 1, words + 2, false, true);
    case 2:
      return launch(pass_message, 2, 1, words, words + 1, words + 2, true, false);
    case 3:
      return launch(read_neighbours, 2, 32, words + 4, false);
    case 4:
      return launch(read_neighbours, 2, 32, words + 4, true);
    case 5:
      return launch(pass_message, 2, 1, words, words + 1, words + 2, true, true);
    default:
      return launch(write_one_word, 2, 32, words, which - 5);
  }
}
EXPORT void test_write_shared(int index, int* sum) { launch(write_shared, 1, 1, index, sum); }

// Sorts by bits [begin, end) of the keys, and turns counts into offsets.
EXPORT int test_sort(const uint64_t* keys, uint64_t* keys_out, const int* values, int* values_out,
                     int64_t count, int begin, int end) {
  size_t bytes = 0;
  cub::DeviceRadixSort::SortPairs(nullptr, bytes, keys, keys_out, values, values_out, count, begin,
                                  end);
  std::vector<char> storage(bytes);
  return cub::DeviceRadixSort::SortPairs(storage.data(), bytes, keys, keys_out, values, values_out,
                                         count, begin, end, nullptr);
}
EXPORT int test_scan(int64_t* exclusive, int64_t* inclusive, int64_t count) {
  size_t bytes = 0;
  cub::DeviceScan::ExclusiveSum(nullptr, bytes, exclusive, exclusive, count);
  std::vector<char> storage(bytes);
  const int status =
      cub::DeviceScan::ExclusiveSum(storage.data(), bytes, exclusive, exclusive, count);
  return status != 0 ? status
                     : cub::DeviceScan::InclusiveSum(storage.data(), bytes, inclusive, inclusive,
                                                     count, nullptr);
}

// 0, or the line of the check that failed.
#define EXPECT(condition) \
  if (!(condition)) return __LINE__

EXPORT int test_virtual_memory(int access_after_unmap) {
  decltype(cuMemCreate)* create;
  decltype(cuMemMap)* map;
  EXPECT(driver_function("cuMemCreate", &create) && driver_function("cuMemMap", &map));
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
  size_t unit = 0;
  EXPECT(cuMemGetAllocationGranularity(&unit, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM) ==
         CUDA_SUCCESS);
  CUdeviceptr begin = 0;
  EXPECT(cuMemAddressReserve(&begin, 8 * unit, 0, 0, 0) == CUDA_SUCCESS);
  EXPECT(begin % unit == 0);
  CUmemGenericAllocationHandle handle;
  emulator_set_memory_limit(static_cast<long long>(unit));
  EXPECT(create(&handle, unit + 1, &properties, 0) == CUDA_ERROR_INVALID_VALUE);
  EXPECT(create(&handle, 2 * unit, &properties, 0) == CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT(create(&handle, unit, &properties, 0) == CUDA_SUCCESS);
  EXPECT(emulator_created_bytes() == static_cast<long long>(unit));
  size_t free_bytes = 1;
  size_t total_bytes = 0;
  EXPECT(cudaMemGetInfo(&free_bytes, &total_bytes) == cudaSuccess && free_bytes == 0);

  const CUdeviceptr second = begin + unit;
  CUmemAccessDesc access{properties.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  EXPECT(cuMemSetAccess(second, unit, &access, 1) == CUDA_ERROR_INVALID_VALUE);
  EXPECT(map(begin + 8 * unit, unit, 0, handle, 0) == CUDA_ERROR_INVALID_VALUE);
  EXPECT(map(second, unit, 0, handle, 0) == CUDA_SUCCESS);
  EXPECT(map(second, unit, 0, handle, 0) == CUDA_ERROR_INVALID_VALUE);
  EXPECT(cuMemSetAccess(begin, 2 * unit, &access, 1) == CUDA_ERROR_INVALID_VALUE);
  EXPECT(cuMemSetAccess(second, unit, &access, 1) == CUDA_SUCCESS);
  auto* memory = reinterpret_cast<volatile unsigned char*>(second);
  EXPECT(memory[0] == 0xA5 && memory[unit - 1] == 0xA5);
  memory[0] = 1;
  EXPECT(memory[0] == 1);

  EXPECT(cuMemRelease(handle) == CUDA_SUCCESS);
  EXPECT(cuMemAddressFree(begin, 8 * unit) == CUDA_ERROR_INVALID_VALUE);
  EXPECT(emulator_created_bytes() == static_cast<long long>(unit));  // still mapped
  EXPECT(cuMemUnmap(second, unit) == CUDA_SUCCESS);
  if (access_after_unmap != 0) memory[0] = 2;
  EXPECT(emulator_created_bytes() == 0);
  EXPECT(cuMemAddressFree(begin, 8 * unit) == CUDA_SUCCESS);
  emulator_set_memory_limit(-1);
  return 0;
}

EXPORT int test_capture() {
  cudaStream_t other;
  cudaStreamCaptureStatus status;
  EXPECT(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking) == cudaSuccess);
  emulator_set_capturing(1);
  EXPECT(cudaStreamIsCapturing(nullptr, &status) == cudaSuccess);
  EXPECT(status == cudaStreamCaptureStatusActive);
  EXPECT(cudaStreamIsCapturing(other, &status) == cudaSuccess);
  EXPECT(status == cudaStreamCaptureStatusNone);
  void* memory = nullptr;
  EXPECT(cudaHostAlloc(&memory, 8, cudaHostAllocMapped) == cudaErrorStreamCaptureUnsupported);
  EXPECT(cudaGetLastError() == cudaErrorStreamCaptureUnsupported);
  EXPECT(cudaGetLastError() == cudaSuccess);
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  EXPECT(cudaThreadExchangeStreamCaptureMode(&mode) == cudaSuccess);
  EXPECT(cudaHostAlloc(&memory, 8, cudaHostAllocMapped) == cudaSuccess);
  EXPECT(cudaStreamSynchronize(other) == cudaSuccess);
  EXPECT(cudaStreamSynchronize(nullptr) == cudaErrorStreamCaptureUnsupported);
  EXPECT(cudaThreadExchangeStreamCaptureMode(&mode) == cudaSuccess);
  emulator_set_capturing(0);
  EXPECT(mode == cudaStreamCaptureModeRelaxed);
  EXPECT(cudaFreeHost(memory) == cudaSuccess);
  return cudaStreamDestroy(other);
}

EXPORT int test_lazy_streams() {
  cudaStream_t first = emulator_new_stream();
  cudaStream_t second = emulator_new_stream();
  cudaEvent_t event;
  EXPECT(cudaEventCreateWithFlags(&event, cudaEventDisableTiming) == cudaSuccess);
  std::vector<unsigned char> bytes(3, 0);
  emulator_set_lazy(1);
  EXPECT(cudaMemsetAsync(bytes.data(), 1, 1, first) == cudaSuccess);
  EXPECT(cudaEventRecord(event, first) == cudaSuccess);
  EXPECT(cudaMemsetAsync(bytes.data() + 1, 1, 1, first) == cudaSuccess);
  EXPECT(cudaMemcpyAsync(bytes.data() + 2, bytes.data(), 1, cudaMemcpyDeviceToDevice, second) ==
         cudaSuccess);
  EXPECT(bytes == std::vector<unsigned char>({0, 0, 0}));
  EXPECT(cudaMemcpyAsync(bytes.data() + 2, bytes.data(), 1, cudaMemcpyDeviceToDevice) ==
         cudaSuccess);  // the default stream: at once
  EXPECT(cudaStreamWaitEvent(second, event, 0) == cudaSuccess);
  EXPECT(cudaMemcpyAsync(bytes.data() + 2, bytes.data(), 1, cudaMemcpyDeviceToDevice, second) ==
         cudaSuccess);
  EXPECT(bytes == std::vector<unsigned char>({0, 0, 0}));
  emulator_ignore_wait(1, 1);
  EXPECT(cudaStreamSynchronize(second) == cudaSuccess);
  EXPECT(bytes == std::vector<unsigned char>({0, 0, 0}));
  EXPECT(cudaStreamSynchronize(second) == cudaSuccess);
  EXPECT(bytes == std::vector<unsigned char>({1, 0, 1}));  // of the other stream up to the event
  EXPECT(cudaStreamQuery(first) == cudaErrorNotReady);     // one piece of work is done meanwhile
  EXPECT(bytes[1] == 1 && cudaStreamQuery(first) == cudaSuccess);
  emulator_set_lazy(0);
  EXPECT(cudaMemsetAsync(bytes.data(), 2, 1, first) == cudaSuccess && bytes[0] == 2);
  EXPECT(cudaEventDestroy(event) == cudaSuccess && cudaStreamDestroy(first) == cudaSuccess);
  return cudaStreamDestroy(second);
}

EXPORT int test_forked_capture() {
  cudaStream_t fork = emulator_new_stream();
  cudaStream_t other = emulator_new_stream();
  unsigned long long captured = 0;
  unsigned long long forked = 0;
  cudaStreamCaptureStatus status;
  cudaEvent_t outside;
  EXPECT(cudaEventCreateWithFlags(&outside, cudaEventDisableTiming) == cudaSuccess);
  EXPECT(cudaEventRecord(outside, other) == cudaSuccess);
  emulator_set_capturing(1);
  EXPECT(cudaStreamGetCaptureInfo(nullptr, &status, &captured) == cudaSuccess && captured != 0);
  EXPECT(cudaStreamWaitEvent(nullptr, outside, 0) == cudaErrorStreamCaptureIsolation);
  emulator_wait_stream(fork, nullptr);
  EXPECT(cudaStreamGetCaptureInfo(fork, &status, &forked) == cudaSuccess && forked == captured);
  EXPECT(cudaEventRecord(outside, fork) == cudaSuccess);
  unsigned char byte = 0;
  EXPECT(cudaMemsetAsync(&byte, 1, 1, fork) == cudaSuccess);
  const long long before = emulator_forbidden_calls();
  emulator_set_capturing(0);  // what has been forked was not joined
  EXPECT(emulator_forbidden_calls() == before + 1);
  EXPECT(cudaStreamWaitEvent(other, outside, 0) == cudaErrorCapturedEvent);
  emulator_set_capturing(1);
  emulator_wait_stream(fork, nullptr);
  EXPECT(cudaMemsetAsync(&byte, 1, 1, fork) == cudaSuccess);
  emulator_wait_stream(nullptr, fork);
  emulator_set_capturing(0);
  EXPECT(emulator_forbidden_calls() == before + 2);
  cudaGetLastError();
  EXPECT(cudaEventDestroy(outside) == cudaSuccess && cudaStreamDestroy(fork) == cudaSuccess);
  return cudaStreamDestroy(other);
}
