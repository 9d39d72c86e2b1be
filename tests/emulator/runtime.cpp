// Runtime and driver functions for devices and memory. Physical memory of the driver's functions is
// a range of one file in memory, so that it keeps its bytes when it is unmapped here and mapped
// elsewhere.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "cuda.h"
#include "emulator/streams.h"

namespace emulator {
namespace {

constexpr size_t kGranularity = size_t{2} << 20;
constexpr size_t kTotalBytes = size_t{64} << 30;  // of the device, if a test sets no limit
constexpr int kGarbageByte = 0xA5;

void* garbage(size_t bytes) {
  const size_t rounded = (bytes + 4095) / 4096 * 4096;
  void* memory = std::aligned_alloc(4096, rounded);
  if (memory != nullptr) std::memset(memory, kGarbageByte, rounded);
  return memory;
}

struct Allocation {
  off_t begin;
  size_t size;
  bool on_host;
  int mappings;
  bool released;
};
struct Mapping {
  size_t size;
  CUmemGenericAllocationHandle handle;
  bool cpu_access;
};

std::mutex mapping_mutex;
std::map<CUdeviceptr, size_t> reservations;
std::map<CUdeviceptr, Mapping> mappings;
std::map<CUmemGenericAllocationHandle, Allocation> allocations;
CUmemGenericAllocationHandle next_handle = 1;
off_t file_end = 0;
long long created_bytes = 0;
long long memory_limit = -1;
long long host_bytes = 0;  // of HOST and HOST_NUMA locations
long long host_limit = -1;
bool refused_locations[4] = {false, false, false, false};  // by type
long long refused_unmappings = 0;                          // of cuMemUnmap, from now on

int memory_file() {
  static const int file = memfd_create("emulated device memory", MFD_CLOEXEC);
  return file;
}

bool is_device(CUmemLocation location) {
  return location.type == CU_MEM_LOCATION_TYPE_DEVICE && location.id == 0;
}
// The emulated machine has one NUMA node.
bool is_host(CUmemLocation location) {
  return location.type == CU_MEM_LOCATION_TYPE_HOST ||
         (location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA && location.id == 0);
}
CUresult check_location(CUmemLocation location) {
  if (!is_device(location) && !is_host(location)) return CUDA_ERROR_INVALID_DEVICE;
  return refused_locations[location.type] ? CUDA_ERROR_NOT_SUPPORTED : CUDA_SUCCESS;
}
bool is_whole(size_t size) { return size > 0 && size % kGranularity == 0; }
void* address(CUdeviceptr pointer) { return reinterpret_cast<void*>(pointer); }

bool fill_with_garbage(off_t begin, size_t size) {
  static const std::vector<char> bytes(kGranularity, static_cast<char>(kGarbageByte));
  for (size_t done = 0; done < size;) {
    const size_t part = size - done < bytes.size() ? size - done : bytes.size();
    const ssize_t written =
        pwrite(memory_file(), bytes.data(), part, begin + static_cast<off_t>(done));
    if (written <= 0) return false;
    done += static_cast<size_t>(written);
  }
  return true;
}

void drop_unused(std::map<CUmemGenericAllocationHandle, Allocation>::iterator found) {
  const Allocation& allocation = found->second;
  if (!allocation.released || allocation.mappings > 0) return;
  (allocation.on_host ? host_bytes : created_bytes) -= static_cast<long long>(allocation.size);
  fallocate(memory_file(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, allocation.begin,
            static_cast<off_t>(allocation.size));
  allocations.erase(found);
}

// Whether whole mappings cover [pointer, pointer + size) without a gap.
bool is_mapped(CUdeviceptr pointer, size_t size) {
  const CUdeviceptr end = pointer + size;
  while (pointer < end) {
    const auto found = mappings.find(pointer);
    if (found == mappings.end()) return false;
    pointer += found->second.size;
  }
  return pointer == end;
}
bool is_reserved(CUdeviceptr pointer, size_t size) {
  auto after = reservations.upper_bound(pointer);
  if (after == reservations.begin()) return false;
  const auto found = std::prev(after);
  return pointer + size <= found->first + found->second;
}
bool touches_mapping(CUdeviceptr pointer, size_t size) {
  const auto after = mappings.lower_bound(pointer + size);
  if (after == mappings.begin()) return false;
  const auto last = std::prev(after);
  return last->first + last->second.size > pointer;
}

// Whether one copy or memset may touch a range: the driver takes all of it for memory of the place
// where it begins, and reads host memory as a CPU does.
bool is_copyable(const void* begin, size_t bytes) {
  const auto pointer = reinterpret_cast<CUdeviceptr>(begin);
  const std::lock_guard<std::mutex> lock(mapping_mutex);
  auto mapping = mappings.upper_bound(pointer);
  if (mapping != mappings.begin()) --mapping;
  int hbm = 0;
  int host = 0;
  for (; mapping != mappings.end() && mapping->first < pointer + bytes; ++mapping) {
    if (mapping->first + mapping->second.size <= pointer) continue;
    const bool on_host = allocations[mapping->second.handle].on_host;
    if (on_host && !mapping->second.cpu_access) return false;
    ++(on_host ? host : hbm);
  }
  return hbm == 0 || host == 0;
}

struct Function {
  const char* name;
  void* address;
};
#define EMULATOR_FUNCTION(name) {#name, reinterpret_cast<void*>(&name)}
const Function kFunctions[] = {
    EMULATOR_FUNCTION(cuGetErrorName),
    EMULATOR_FUNCTION(cuGetErrorString),
    EMULATOR_FUNCTION(cuMemAddressReserve),
    EMULATOR_FUNCTION(cuMemAddressFree),
    EMULATOR_FUNCTION(cuMemCreate),
    EMULATOR_FUNCTION(cuMemRelease),
    EMULATOR_FUNCTION(cuMemMap),
    EMULATOR_FUNCTION(cuMemUnmap),
    EMULATOR_FUNCTION(cuMemSetAccess),
    EMULATOR_FUNCTION(cuMemGetAllocationGranularity),
};
#undef EMULATOR_FUNCTION

struct ErrorText {
  int error;
  const char* runtime_name;
  const char* driver_name;
  const char* text;
};
const ErrorText kErrors[] = {
    {0, "cudaSuccess", "CUDA_SUCCESS", "no error"},
    {1, "cudaErrorInvalidValue", "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "cudaErrorMemoryAllocation", "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {101, "cudaErrorInvalidDevice", "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {700, "cudaErrorIllegalAddress", "CUDA_ERROR_ILLEGAL_ADDRESS",
     "an illegal memory access was encountered"},
    {801, "cudaErrorNotSupported", "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {907, "cudaErrorCapturedEvent", "CUDA_ERROR_CAPTURED_EVENT",
     "operation not permitted on an event last recorded in a capturing stream"},
    {905, "cudaErrorStreamCaptureIsolation", "CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
     "dependency created on uncaptured work in another stream"},
    {900, "cudaErrorStreamCaptureUnsupported", "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
};
const ErrorText* find_error(int error) {
  for (const ErrorText& entry : kErrors) {
    if (entry.error == error) return &entry;
  }
  return nullptr;
}

}  // namespace
}  // namespace emulator

using namespace emulator;

extern "C" {

void emulator_refuse_unmapping(long long calls) {
  const std::lock_guard<std::mutex> lock(mapping_mutex);
  refused_unmappings = calls;
}
void emulator_set_memory_limit(long long bytes) {
  const std::lock_guard<std::mutex> lock(mapping_mutex);
  memory_limit = bytes;
}
void emulator_set_host_limit(long long bytes) {
  const std::lock_guard<std::mutex> lock(mapping_mutex);
  host_limit = bytes;
}
long long emulator_host_bytes() {
  const std::lock_guard<std::mutex> lock(mapping_mutex);
  return host_bytes;
}
void emulator_refuse_location(int type, int on) {
  const std::lock_guard<std::mutex> lock(mapping_mutex);
  refused_locations[type] = on != 0;
}
int emulator_is_copyable(const void* begin, long long bytes) {
  return is_copyable(begin, static_cast<size_t>(bytes)) ? 1 : 0;
}
void emulator_copy(cudaStream_t stream, void* to, const void* from, long long bytes) {
  cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, stream);
}
long long emulator_created_bytes() {
  const std::lock_guard<std::mutex> lock(mapping_mutex);
  return created_bytes;
}

const char* cudaGetErrorName(cudaError_t error) {
  const ErrorText* found = find_error(error);
  return found == nullptr ? "unrecognized error code" : found->runtime_name;
}
const char* cudaGetErrorString(cudaError_t error) {
  const ErrorText* found = find_error(error);
  return found == nullptr ? "unrecognized error code" : found->text;
}
cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  return returned(device == 0 ? cudaSuccess : cudaErrorInvalidDevice);
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (device != 0) return returned(cudaErrorInvalidDevice);
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
      *value = 1024;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = 48 << 10;
      return cudaSuccess;
    case cudaDevAttrWarpSize:
      *value = 32;
      return cudaSuccess;
    case cudaDevAttrMultiProcessorCount:
      *value = 4;
      return cudaSuccess;
    case cudaDevAttrL2CacheSize:
      *value = 32 << 20;
      return cudaSuccess;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *value = 2048;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 0;
      return cudaSuccess;
    case cudaDevAttrHostNumaId:
      *value = 0;
      return cudaSuccess;
  }
  return returned(cudaErrorInvalidValue);
}
cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  const std::lock_guard<std::mutex> lock(mapping_mutex);
  const auto used = static_cast<size_t>(created_bytes);
  *total_bytes = memory_limit < 0 ? kTotalBytes : static_cast<size_t>(memory_limit);
  *free_bytes = *total_bytes > used ? *total_bytes - used : 0;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  if (const cudaError_t error = unless_captured()) return error;
  *pointer = garbage(bytes);
  return returned(*pointer == nullptr ? cudaErrorMemoryAllocation : cudaSuccess);
}
cudaError_t cudaFree(void* pointer) {
  if (const cudaError_t error = unless_captured()) return error;
  std::free(pointer);
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  return cudaMalloc(pointer, bytes);
}
cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  *device = host;
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* pointer) { return cudaFree(pointer); }
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  if (const cudaError_t error = unless_captured()) return error;
  return cudaMemcpyAsync(to, from, bytes, kind, nullptr);
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  if (bytes == 0) return cudaSuccess;
  if (const cudaError_t error = faulted()) return error;
  if (!is_copyable(to, bytes) || !is_copyable(from, bytes)) return returned(cudaErrorInvalidValue);
  if (kind == cudaMemcpyHostToDevice && !runs_at_once(stream)) {
    // CUDA reads pageable memory before it returns
    const char* begin = static_cast<const char*>(from);
    queue(stream, [to, data = std::vector<char>(begin, begin + bytes)] {
      std::memcpy(to, data.data(), data.size());
    });
    return cudaSuccess;
  }
  run(stream, [to, from, bytes] { std::memcpy(to, from, bytes); });
  if (kind == cudaMemcpyDeviceToHost) finish(stream);  // CUDA waits, for pageable memory
  return cudaSuccess;
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  if (const cudaError_t error = unless_captured()) return error;
  return cudaMemsetAsync(to, value, bytes, nullptr);
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  if (bytes == 0) return cudaSuccess;
  if (!is_copyable(to, bytes)) return returned(cudaErrorInvalidValue);
  return run(stream, [to, value, bytes] { std::memset(to, value, bytes); });
}

cudaError_t cudaGetDriverEntryPoint(const char* symbol, void** function, unsigned long long,
                                    cudaDriverEntryPointQueryResult* status) {
  *function = nullptr;
  for (const Function& known : kFunctions) {
    if (std::strcmp(known.name, symbol) == 0) *function = known.address;
  }
  if (status != nullptr) {
    *status =
        *function == nullptr ? cudaDriverEntryPointSymbolNotFound : cudaDriverEntryPointSuccess;
  }
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned,
                                             unsigned long long flags,
                                             cudaDriverEntryPointQueryResult* status) {
  return cudaGetDriverEntryPoint(symbol, function, flags, status);
}

CUresult cuGetErrorName(CUresult error, const char** text) {
  const ErrorText* found = find_error(error);
  *text = found == nullptr ? nullptr : found->driver_name;
  return found == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char** text) {
  const ErrorText* found = find_error(error);
  *text = found == nullptr ? nullptr : found->text;
  return found == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuMemGetAllocationGranularity(size_t* granularity, const CUmemAllocationProp* properties,
                                       CUmemAllocationGranularity_flags) {
  const std::lock_guard<std::mutex> lock(mapping_mutex);
  *granularity = kGranularity;
  return check_location(properties->location);
}

CUresult cuMemAddressReserve(CUdeviceptr* pointer, size_t size, size_t alignment, CUdeviceptr,
                             unsigned long long flags) {
  if (!is_whole(size) || flags != 0 || (alignment & (alignment - 1)) != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (alignment < kGranularity) alignment = kGranularity;
  const std::lock_guard<std::mutex> lock(mapping_mutex);
  void* memory = mmap(nullptr, size + alignment, PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  const auto begin = reinterpret_cast<CUdeviceptr>(memory);
  *pointer = (begin + alignment - 1) / alignment * alignment;
  if (*pointer > begin) munmap(memory, *pointer - begin);
  if (*pointer < begin + alignment) munmap(address(*pointer + size), begin + alignment - *pointer);
  reservations[*pointer] = size;
  return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr pointer, size_t size) {
  const std::lock_guard<std::mutex> lock(mapping_mutex);
  const auto found = reservations.find(pointer);
  if (found == reservations.end() || found->second != size || touches_mapping(pointer, size)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  munmap(address(pointer), size);
  reservations.erase(found);
  return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size,
                     const CUmemAllocationProp* properties, unsigned long long flags) {
  if (!is_whole(size) || flags != 0 || properties->type != CU_MEM_ALLOCATION_TYPE_PINNED) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (faulted() != cudaSuccess) return CUDA_ERROR_ILLEGAL_ADDRESS;
  if (unless_captured() != cudaSuccess) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  const std::lock_guard<std::mutex> lock(mapping_mutex);
  const CUresult accepted = check_location(properties->location);
  if (accepted != CUDA_SUCCESS) return accepted;
  const bool on_host = is_host(properties->location);
  long long& used = on_host ? host_bytes : created_bytes;
  const long long limit = on_host ? host_limit : memory_limit;
  const long long after = used + static_cast<long long>(size);
  if (limit >= 0 && after > limit) return CUDA_ERROR_OUT_OF_MEMORY;
  if (!fill_with_garbage(file_end, size)) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = next_handle++;
  allocations[*handle] = {file_end, size, on_host, 0, false};
  file_end += static_cast<off_t>(size);
  used = after;
  return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  if (faulted() != cudaSuccess) return CUDA_ERROR_ILLEGAL_ADDRESS;
  const std::lock_guard<std::mutex> lock(mapping_mutex);
  const auto found = allocations.find(handle);
  if (found == allocations.end() || found->second.released) return CUDA_ERROR_INVALID_VALUE;
  found->second.released = true;
  drop_unused(found);
  return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr pointer, size_t size, size_t offset,
                  CUmemGenericAllocationHandle handle, unsigned long long flags) {
  if (faulted() != cudaSuccess) return CUDA_ERROR_ILLEGAL_ADDRESS;
  const std::lock_guard<std::mutex> lock(mapping_mutex);
  const auto found = allocations.find(handle);
  if (found == allocations.end() || found->second.released || offset != 0 || flags != 0 ||
      !is_whole(size) || size > found->second.size || pointer % kGranularity != 0 ||
      !is_reserved(pointer, size) || touches_mapping(pointer, size)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  void* mapped = mmap(address(pointer), size, PROT_NONE, MAP_SHARED | MAP_FIXED, memory_file(),
                      found->second.begin);
  if (mapped == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  mappings[pointer] = {size, handle, false};
  ++found->second.mappings;
  return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr pointer, size_t size) {
  if (faulted() != cudaSuccess) return CUDA_ERROR_ILLEGAL_ADDRESS;
  if (unless_captured() != cudaSuccess) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  const std::lock_guard<std::mutex> lock(mapping_mutex);
  if (refused_unmappings > 0) {
    --refused_unmappings;
    return CUDA_ERROR_UNKNOWN;
  }
  if (!is_whole(size) || !is_mapped(pointer, size)) return CUDA_ERROR_INVALID_VALUE;
  void* unmapped = mmap(address(pointer), size, PROT_NONE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  if (unmapped == MAP_FAILED) return CUDA_ERROR_UNKNOWN;
  for (CUdeviceptr end = pointer + size; pointer < end;) {
    const auto mapping = mappings.find(pointer);
    const auto allocation = allocations.find(mapping->second.handle);
    --allocation->second.mappings;
    drop_unused(allocation);
    pointer += mapping->second.size;
    mappings.erase(mapping);
  }
  return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr pointer, size_t size, const CUmemAccessDesc* descriptions,
                        size_t count) {
  const std::lock_guard<std::mutex> lock(mapping_mutex);
  if (count < 1 || count > 2 || !is_whole(size) || !is_mapped(pointer, size)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (!is_device(descriptions->location)) return CUDA_ERROR_INVALID_DEVICE;
  if (count == 2) {
    if (!is_host(descriptions[1].location)) return CUDA_ERROR_INVALID_DEVICE;
    for (CUdeviceptr at = pointer; at < pointer + size; at += mappings[at].size) {
      if (!allocations[mappings[at].handle].on_host) return CUDA_ERROR_NOT_SUPPORTED;
      mappings[at].cpu_access = true;
    }
  }
  int protection = PROT_NONE;
  if (descriptions->flags == CU_MEM_ACCESS_FLAGS_PROT_READ) protection = PROT_READ;
  if (descriptions->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE) {
    protection = PROT_READ | PROT_WRITE;
  }
  return mprotect(address(pointer), size, protection) == 0 ? CUDA_SUCCESS : CUDA_ERROR_UNKNOWN;
}

}  // extern "C"
