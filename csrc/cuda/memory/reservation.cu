#include <cuda.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <limits>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "arguments/reserved_layout.h"
#include "core/runtime/error_class.h"
#include "cuda/memory/reservation.h"
#include "cuda/memory/table_memory.h"
#include "cuda/runtime/device.cuh"
#include "cuda/runtime/used_streams.h"

namespace dynemb::cuda {
namespace {

// The driver's functions are looked up at run time, so that the library loads without a driver.
struct Driver {
  decltype(&cuMemGetAllocationGranularity) granularity;
  decltype(&cuMemAddressReserve) reserve;
  decltype(&cuMemAddressFree) free;
  decltype(&cuMemCreate) create;
  decltype(&cuMemRelease) release;
  decltype(&cuMemMap) map;
  decltype(&cuMemUnmap) unmap;
  decltype(&cuMemSetAccess) set_access;
  decltype(&cuGetErrorString) error_string;
};

template <class F>
void look_up(const char* op, const char* name, F* function) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found;
  constexpr unsigned kVersion = 12000;  // of the functions' signatures
  check_cuda(op, name,
             cudaGetDriverEntryPointByVersion(name, &entry, kVersion, cudaEnableDefault, &found));
  DYNEMB_CHECK(entry != nullptr && found == cudaDriverEntryPointSuccess, "dynemb::", op,
               ": the GPU driver has no ", name, ": install a newer driver");
  *function = reinterpret_cast<F>(entry);
}

const Driver& driver(const char* op) {
  static const Driver functions = [op] {
    Driver d{};
    look_up(op, "cuMemGetAllocationGranularity", &d.granularity);
    look_up(op, "cuMemAddressReserve", &d.reserve);
    look_up(op, "cuMemAddressFree", &d.free);
    look_up(op, "cuMemCreate", &d.create);
    look_up(op, "cuMemRelease", &d.release);
    look_up(op, "cuMemMap", &d.map);
    look_up(op, "cuMemUnmap", &d.unmap);
    look_up(op, "cuMemSetAccess", &d.set_access);
    look_up(op, "cuGetErrorString", &d.error_string);
    return d;
  }();
  return functions;
}

void check_driver(const char* op, const char* what, CUresult status) {
  if (status == CUDA_SUCCESS) return;
  const char* text = nullptr;
  driver(op).error_string(status, &text);
  DYNEMB_CHECK(false, "dynemb::", op, ": the GPU driver failed in ", what, ": ",
               text == nullptr ? "unknown error" : text);
}

CUmemAllocationProp allocation_properties(CUmemLocation location) {
  CUmemAllocationProp properties = {};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = location;
  return properties;
}

CUmemLocation location_of(int32_t device) { return {CU_MEM_LOCATION_TYPE_DEVICE, device}; }

// Host memory that a driver may map for a GPU. HOST needs a driver of CUDA 13; older ones have
// HOST_NUMA, which a container may forbid.
struct HostLocation {
  const char* name;
  CUmemLocation location;
};

std::vector<HostLocation> host_locations(const char* op, int32_t device) {
  int node = 0;
  check_cuda(op, "asking for the NUMA node of the GPU",
             cudaDeviceGetAttribute(&node, cudaDevAttrHostNumaId, device));
  return {{"HOST", {CU_MEM_LOCATION_TYPE_HOST, 0}},
          {"HOST_NUMA", {CU_MEM_LOCATION_TYPE_HOST_NUMA, std::max(node, 0)}}};
}

// Maps a piece of memory at an address for the GPU, and for `also`. Leaves nothing behind
// otherwise.
CUresult map_piece(const Driver& d, CUdeviceptr address, size_t size, uint64_t handle,
                   CUmemLocation device, const CUmemLocation* also) {
  const CUresult mapped = d.map(address, size, 0, handle, 0);
  if (mapped != CUDA_SUCCESS) return mapped;
  CUmemAccessDesc access[2] = {};
  access[0].location = device;
  access[0].flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  if (also != nullptr) access[1] = {*also, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  const CUresult accessible = d.set_access(address, size, access, also == nullptr ? 1 : 2);
  if (accessible != CUDA_SUCCESS) d.unmap(address, size);
  return accessible;
}

// Takes HBM and maps it. Returns CUDA_ERROR_OUT_OF_MEMORY if memory is short.
CUresult map_hbm_piece(const char* op, int32_t device, CUdeviceptr address, size_t size,
                       uint64_t* handle) {
  const Driver& d = driver(op);
  const CUmemAllocationProp properties = allocation_properties(location_of(device));
  CUmemGenericAllocationHandle created = 0;
  CUresult status = d.create(&created, size, &properties, 0);
  if (status == CUDA_ERROR_OUT_OF_MEMORY) return status;
  check_driver(op, "allocating memory", status);
  *handle = created;
  status = map_piece(d, address, size, created, location_of(device), nullptr);
  if (status != CUDA_SUCCESS) d.release(created);
  check_driver(op, "mapping memory", status);
  return status;
}

// Takes host memory at the first location that the driver accepts, and maps it for the GPU and for
// CPUs: the driver copies host memory as a CPU does. Returns CUDA_ERROR_OUT_OF_MEMORY if memory is
// short; raises if the driver refuses all locations.
CUresult map_host_piece(const char* op, int32_t device, CUdeviceptr address, size_t size,
                        int64_t page, uint64_t* handle) {
  const Driver& d = driver(op);
  std::string refusals;
  for (const HostLocation& candidate : host_locations(op, device)) {
    const CUmemAllocationProp properties = allocation_properties(candidate.location);
    size_t granularity = 0;
    CUresult status = d.granularity(&granularity, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    if (status == CUDA_SUCCESS && page % static_cast<int64_t>(granularity) != 0) {
      refusals += std::string(refusals.empty() ? "" : "; ") + candidate.name + ": pages of " +
                  std::to_string(granularity >> 10) + " KiB";
      continue;
    }
    if (status == CUDA_SUCCESS) {
      CUmemGenericAllocationHandle created = 0;
      status = d.create(&created, size, &properties, 0);
      if (status == CUDA_ERROR_OUT_OF_MEMORY) return status;
      if (status == CUDA_SUCCESS) {
        *handle = created;
        status = map_piece(d, address, size, created, location_of(device), &candidate.location);
        if (status == CUDA_SUCCESS) return status;
        d.release(created);
      }
    }
    const char* text = nullptr;
    d.error_string(status, &text);
    refusals += std::string(refusals.empty() ? "" : "; ") + candidate.name + ": " +
                (text == nullptr ? "unknown error" : text);
  }
  DYNEMB_CHECK(false, "dynemb::", op, ": the GPU driver maps no host memory for rows beyond HBM (",
               refusals,
               "): install driver 580 or newer, start the container with CAP_SYS_NICE, "
               "or leave storage out");
  return CUDA_ERROR_UNKNOWN;
}

constexpr int64_t kPieceBytes = int64_t{64} << 20;

// 16 bytes written for each thread and turn: host memory, which cudaMemset takes for a CPU's.
__global__ void clear_words(uint4* words, int64_t count) {
  for (int64_t i = thread_number(); i < count; i += thread_total()) words[i] = {0, 0, 0, 0};
}

struct Retired {
  int32_t device;
  std::shared_ptr<void> ended;
};
std::mutex retired_mutex;
std::vector<Retired>& retired() {
  static auto* list = new std::vector<Retired>();
  return *list;
}

std::atomic<void (*)()> empty_cache{nullptr};

std::mutex registry_mutex;
std::map<uintptr_t, std::shared_ptr<Reservation>>& registry() {
  static auto* map = new std::map<uintptr_t, std::shared_ptr<Reservation>>();  // outlives tensors
  return *map;
}

// A CUDA tensor of reserved addresses with memory for its first page. Do not touch it beyond the
// memory that its group has mapped (bind_group).
Tensor reserve_cuda(std::vector<int64_t> size, int64_t dtype, int64_t device) {
  const char* op = "reserve_cuda";
  const ReservedLayout layout = reserved_layout(op, size, dtype);
  const auto device_index = static_cast<int32_t>(device);
  const CurrentDevice guard(device_index);
  drop_retired();
#if defined(DYNEMB_EMULATED)
  const torch::stable::Device where(torch::headeronly::DeviceType::CPU);
#else
  const torch::stable::Device where(torch::headeronly::DeviceType::CUDA, device_index);
#endif
  if (layout.bytes == 0) {
    return torch::stable::empty(size, layout.dtype, std::nullopt, where);
  }
  const auto reservation = std::make_shared<Reservation>(op, layout.bytes, device_index);
  {
    // from_blob asks the driver for the kind of address, which the driver knows for mapped memory
    // only
    const RelaxedCapture relaxed(op);
    const cudaStream_t stream = side_stream(op, device_index);
    std::vector<int64_t> added;
    Mapped mapped = reservation->map(op, 0, 1, stream, &added);
    if (mapped != Mapped::kYes) {
      empty_torch_cache();
      mapped = reservation->map(op, 0, 1, stream, &added);
    }
    DYNEMB_CHECK(
        mapped == Mapped::kYes, "dynemb::reserve_cuda: out of GPU memory: the device has not even ",
        "a page left. Call torch.cuda.empty_cache(), or use another GPU", kDeviceMemoryError);
  }
  {
    const std::lock_guard<std::mutex> lock(registry_mutex);
    registry()[reinterpret_cast<uintptr_t>(reservation->base())] = reservation;
  }
  return torch::stable::from_blob(
      reservation->base(), size, layout.strides, where, layout.dtype, [](void* data) {
        forget_group(data);
        std::shared_ptr<Reservation> ended;
        {
          const std::lock_guard<std::mutex> lock(registry_mutex);
          const auto entry = registry().find(reinterpret_cast<uintptr_t>(data));
          if (entry == registry().end()) return;
          ended = std::move(entry->second);
          registry().erase(entry);
        }
        const int32_t of_device = ended->device();
        retire(of_device, std::move(ended));
      });
}

// Bytes of the device's memory that are free.
int64_t available_cuda_memory(int64_t device) {
  const CurrentDevice guard(static_cast<int32_t>(device));
  size_t free_bytes = 0;
  size_t total = 0;
  check_cuda("available_cuda_memory", "asking for free memory",
             cudaMemGetInfo(&free_bytes, &total));
  return static_cast<int64_t>(free_bytes);
}

}  // namespace

Reservation::Reservation(const char* op, int64_t bytes, int32_t device) : device_(device) {
  const Driver& d = driver(op);
  const CUmemAllocationProp properties = allocation_properties(location_of(device));
  size_t page = 0;
  check_driver(op, "asking for the page size",
               d.granularity(&page, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
  page_ = static_cast<int64_t>(page);
  bytes_ = (bytes + page_ - 1) / page_ * page_;
  CUdeviceptr base = 0;
  const CUresult reserved = d.reserve(&base, static_cast<size_t>(bytes_), page, 0, 0);
  DYNEMB_CHECK(reserved != CUDA_ERROR_OUT_OF_MEMORY, "dynemb::", op, ": the GPU has no ",
               bytes_ >> 20,
               " MiB of addresses left (addresses, not memory: a tensor takes as "
               "many as it may ever need). Give tables max_rows or a capacity, or put them into "
               "one collection",
               kNoRoomError);
  check_driver(op, "reserving addresses", reserved);
  base_ = reinterpret_cast<char*>(base);
}

Reservation::~Reservation() {
  // Kernels that use the memory may still run. If waiting is impossible, the addresses are leaked.
  const DeviceWait waited(device_);
  if (!waited) return;
  const Driver& d = driver("reserve_cuda");
  const auto base = reinterpret_cast<CUdeviceptr>(base_);
  for (const auto& [offset, piece] : pieces_) {
    d.unmap(base + static_cast<CUdeviceptr>(offset), static_cast<size_t>(piece.size));
    d.release(piece.handle);
  }
  d.free(base, static_cast<size_t>(bytes_));
}

void Reservation::set_budget(std::shared_ptr<RowBudget> budget) {
  budget_ = std::move(budget);
  for (const auto& [offset, piece] : pieces_) budget_->add_hbm(piece.size);
}

Mapped Reservation::map(const char* op, int64_t offset, int64_t bytes, cudaStream_t stream,
                        std::vector<int64_t>* added, bool in_hbm) {
  if (bytes <= 0) return Mapped::kYes;
  const int64_t end = std::min((offset + bytes + page_ - 1) / page_ * page_, bytes_);
  int64_t at = offset / page_ * page_;
  Mapped mapped = Mapped::kYes;
  bool cleared = true;
  while (at < end) {
    auto next = pieces_.upper_bound(at);
    if (next != pieces_.begin()) {
      const auto before = std::prev(next);
      const int64_t before_end = before->first + before->second.size;
      if (before_end > at) {
        at = before_end;
        continue;
      }
    }
    // pieces no larger than what is given back at once
    const int64_t most = std::min(end, at + kPieceBytes);
    const int64_t stop = next == pieces_.end() ? most : std::min(most, next->first);
    int64_t size = 0;
    mapped = add_piece(op, at, stop - at, in_hbm, &size);
    if (mapped != Mapped::kYes) break;
    added->push_back(at);
    update_mapped_end();
    const Call call = Call(op, device_).on_stream(stream);
    if (pieces_.at(at).place == Place::kHost) {
      const int64_t words = size / static_cast<int64_t>(sizeof(uint4));
      call.launch_strided(clear_words, words, reinterpret_cast<uint4*>(base_ + at), words);
    } else {
      call.fill(base_ + at, 0, size);
    }
    cleared = false;
    at += size;
  }
  if (!cleared) check_cuda(op, "clearing new memory", cudaStreamSynchronize(stream));
  return mapped;
}

Mapped Reservation::add_piece(const char* op, int64_t offset, int64_t most, bool in_hbm,
                              int64_t* size) {
  Piece piece{most, 0, Place::kHbm};
  if (budget_ != nullptr) {
    const auto share = in_hbm ? budget_->add_hbm(most) : budget_->take(most, page_);
    if (!share.has_value()) return Mapped::kHostIsFull;
    piece.place = share->place;
    piece.size = share->bytes;
  }
  const auto address = reinterpret_cast<CUdeviceptr>(base_) + static_cast<CUdeviceptr>(offset);
  const auto bytes = static_cast<size_t>(piece.size);
  try {
    const CUresult status = piece.place == Place::kHost
                                ? map_host_piece(op, device_, address, bytes, page_, &piece.handle)
                                : map_hbm_piece(op, device_, address, bytes, &piece.handle);
    if (status == CUDA_ERROR_OUT_OF_MEMORY) {
      give_back(piece);
      return piece.place == Place::kHost ? Mapped::kHostIsFull : Mapped::kHbmIsFull;
    }
  } catch (...) {
    give_back(piece);
    throw;
  }
  pieces_[offset] = piece;
  *size = piece.size;
  return Mapped::kYes;
}

void Reservation::give_back(const Piece& piece) {
  if (budget_ != nullptr) budget_->give_back({piece.place, piece.size});
}

void Reservation::unmap(const char* op, int64_t begin, int64_t end) {
  const Driver& d = driver(op);
  for (auto piece = pieces_.lower_bound(begin);
       piece != pieces_.end() && piece->first + piece->second.size <= end;) {
    const auto address =
        reinterpret_cast<CUdeviceptr>(base_) + static_cast<CUdeviceptr>(piece->first);
    check_driver(op, "giving memory back",
                 d.unmap(address, static_cast<size_t>(piece->second.size)));
    const uint64_t handle = piece->second.handle;
    give_back(piece->second);
    piece = pieces_.erase(piece);  // it is unmapped, even if the rest fails
    update_mapped_end();
    check_driver(op, "giving memory back", d.release(handle));
  }
}

void Reservation::drop_piece(int64_t offset) {
  const auto piece = pieces_.find(offset);
  if (piece == pieces_.end()) return;
  const Driver& d = driver("reserve_cuda");
  const auto address = reinterpret_cast<CUdeviceptr>(base_) + static_cast<CUdeviceptr>(offset);
  if (d.unmap(address, static_cast<size_t>(piece->second.size)) != CUDA_SUCCESS) return;
  d.release(piece->second.handle);
  give_back(piece->second);
  pieces_.erase(piece);
  update_mapped_end();
}

void Reservation::update_mapped_end() {
  mapped_end_ = pieces_.empty() ? 0 : pieces_.rbegin()->first + pieces_.rbegin()->second.size;
}

DeviceWait::DeviceWait(int32_t device) {
  relaxed_ = cudaGetDevice(&before_) == cudaSuccess && cudaSetDevice(device) == cudaSuccess &&
             cudaThreadExchangeStreamCaptureMode(&mode_) == cudaSuccess;
  waited_ = relaxed_ && wait_for_used_streams(device);
  if (!waited_) cudaGetLastError();
}
DeviceWait::~DeviceWait() {
  if (relaxed_ && cudaThreadExchangeStreamCaptureMode(&mode_) != cudaSuccess) cudaGetLastError();
  if (before_ >= 0 && cudaSetDevice(before_) != cudaSuccess) cudaGetLastError();
}

PinnedWords::PinnedWords(const char* op, int32_t device, int64_t count) : device_(device) {
  const RelaxedCapture relaxed(op);
  void* host = nullptr;
  void* mapped = nullptr;
  check_cuda(op, "allocating words of host memory",
             cudaHostAlloc(&host, static_cast<size_t>(count) * 8,
                           cudaHostAllocMapped | cudaHostAllocPortable));
  host_ = static_cast<volatile int64_t*>(host);
  for (int64_t i = 0; i < count; ++i) host_[i] = 0;
  check_cuda(op, "mapping words of host memory", cudaHostGetDevicePointer(&mapped, host, 0));
  device_words_ = static_cast<volatile int64_t*>(mapped);
}
PinnedWords::~PinnedWords() {
  const DeviceWait waited(device_);
  if (!waited) return;
  if (cudaFreeHost(const_cast<int64_t*>(host_)) != cudaSuccess) cudaGetLastError();
}

void retire(int32_t device, std::shared_ptr<void> ended) {
  {
    const std::lock_guard<std::mutex> lock(retired_mutex);
    retired().push_back({device, std::move(ended)});
  }
  drop_retired();
}

void drop_retired() {
  std::vector<Retired> ended;  // destroyed at the end, without the lock
  const std::lock_guard<std::mutex> lock(retired_mutex);
  auto& all = retired();
  std::map<int32_t, bool> idle;  // by device
  const auto waits = [&](const Retired& one) {
    const auto known = idle.find(one.device);
    if (known != idle.end()) return !known->second;
    const DeviceWait waited(one.device);
    return !(idle[one.device] = static_cast<bool>(waited));
  };
  const auto first = std::stable_partition(all.begin(), all.end(), waits);
  std::move(first, all.end(), std::back_inserter(ended));
  all.erase(first, all.end());
}

std::shared_ptr<Reservation> find_reservation(const void* data) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  const std::lock_guard<std::mutex> lock(registry_mutex);
  auto next = registry().upper_bound(address);
  if (next == registry().begin()) return nullptr;
  --next;
  const auto size = static_cast<uintptr_t>(next->second->bytes());
  return address < next->first + size ? next->second : nullptr;
}

cudaStream_t side_stream(const char* op, int32_t device) {
  static std::mutex mutex;
  static std::map<int32_t, cudaStream_t> streams;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto known = streams.find(device);
  if (known != streams.end()) return known->second;
  cudaStream_t stream = nullptr;
  check_cuda(op, "creating a stream", cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  streams[device] = stream;
  return stream;
}

void empty_torch_cache() {
  if (void (*const function)() = empty_cache) function();
}

RelaxedCapture::RelaxedCapture(const char* op) : mode_(cudaStreamCaptureModeRelaxed) {
  check_cuda(op, "leaving the capture mode", cudaThreadExchangeStreamCaptureMode(&mode_));
}
RelaxedCapture::~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }

}  // namespace dynemb::cuda

extern "C" void dynemb_set_empty_cache(void (*function)()) { dynemb::cuda::empty_cache = function; }

DYNEMB_IMPLEMENT_DEVICELESS_OPS(m) {
  m.impl("reserve_cuda", TORCH_BOX(&dynemb::cuda::reserve_cuda));
  m.impl("available_cuda_memory", TORCH_BOX(&dynemb::cuda::available_cuda_memory));
}
