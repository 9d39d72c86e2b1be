#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <optional>

#include "arguments/clocks.h"
#include "core/columns.h"
#include "core/index/bucket.h"
#include "cuda/index/count_reports.h"
#include "cuda/memory/table_memory.h"
#include "cuda/runtime/device.cuh"

namespace dynemb::cuda {
namespace {

// The number of reports, then two buffers for alternating reports: while one is read the next is
// written to the other.
constexpr int64_t kReportCount = 0;
constexpr int64_t kReportHead = 1;

// One block: 8 bytes read and written to the host for each word, in order. The number of the report
// comes from the host's memory, so that replays of a graph go on counting.
__global__ void report_counts(const int64_t* tables, int64_t table_words, const int64_t* row_clock,
                              int64_t clock_words, volatile int64_t* reports, int64_t table_room,
                              int64_t clock_room) {
  const int64_t number = reports[kReportCount] + 1;
  volatile int64_t* to = reports + kReportHead + number % 2 * (table_room + clock_room);
  for (int64_t i = threadIdx.x; i < table_words; i += blockDim.x) to[i] = tables[i];
  for (int64_t i = threadIdx.x; i < clock_words; i += blockDim.x) to[table_room + i] = row_clock[i];
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0) reports[kReportCount] = number;
}

Tensor cpu_copy(const Tensor& like, const std::vector<int64_t>& words) {
  std::vector<int64_t> size;
  for (int64_t d = 0; d < like.dim(); ++d) size.push_back(like.size(d));
  Tensor copy = torch::stable::empty(size, ScalarType::Long, std::nullopt,
                                     torch::stable::Device(torch::headeronly::DeviceType::CPU));
  std::copy(words.begin(), words.end(), static_cast<int64_t*>(copy.data_ptr()));
  return copy;
}

// Copies of the counts on the CPU, from the last step that the device has finished. Waits for the
// device before the first report, or if the tensors were not reserved.
std::tuple<Tensor, Tensor> reported_counts(Tensor buckets, Tensor tables, Tensor row_clock) {
  const Call call("reported_counts", "buckets", buckets);
  check_counts(call, buckets, tables, row_clock);
  std::vector<int64_t> table_words(static_cast<size_t>(tables.numel()));
  std::vector<int64_t> clock_words(static_cast<size_t>(row_clock.numel()));
  const auto group = group_memory(call, buckets);
  if (group == nullptr || !read_reported_counts(*group, &table_words, &clock_words)) {
    const auto read = [&](const Tensor& from) {
      return call.read("reading the counts", static_cast<const int64_t*>(from.data_ptr()),
                       from.numel());
    };
    table_words = read(tables);
    clock_words = read(row_clock);
  }
  return {cpu_copy(tables, table_words), cpu_copy(row_clock, clock_words)};
}

}  // namespace

CountReports::CountReports(const char* op, int32_t device, int64_t table_words, int64_t clock_words)
    : table_words_(table_words),
      clock_words_(clock_words),
      words_(op, device, kReportHead + 2 * (table_words + clock_words)) {}

void CountReports::forget() { forgotten_ = words_.host()[kReportCount]; }

void CountReports::write(const Call& call, const Tensor& tables, const Tensor& row_clock) const {
  DYNEMB_CHECK(tables.numel() <= table_words_ && row_clock.numel() <= clock_words_,
               "dynemb::", call.op, ": tables has ", tables.numel(), " elements and row_clock ",
               row_clock.numel(), ", more than the group has tables for");
  // the fence of each warp waits for the host
  const int64_t words = std::max(tables.numel(), row_clock.numel());
  const int64_t block = std::clamp<int64_t>((words + 31) / 32 * 32, 32, 1024);
  call.launch(report_counts, block, block, static_cast<const int64_t*>(tables.data_ptr()),
              tables.numel(), static_cast<const int64_t*>(row_clock.data_ptr()), row_clock.numel(),
              words_.device(), table_words_, clock_words_);
}

bool CountReports::read(std::vector<int64_t>* tables, std::vector<int64_t>* row_clock) const {
  for (;;) {
    const int64_t number = words_.host()[kReportCount];
    if (number == forgotten_) return false;
    std::atomic_thread_fence(std::memory_order_acquire);
    const volatile int64_t* from =
        words_.host() + kReportHead + number % 2 * (table_words_ + clock_words_);
    for (size_t i = 0; i < tables->size(); ++i) (*tables)[i] = from[i];
    for (size_t i = 0; i < row_clock->size(); ++i) {
      (*row_clock)[i] = from[table_words_ + static_cast<int64_t>(i)];
    }
    std::atomic_thread_fence(std::memory_order_acquire);
    if (words_.host()[kReportCount] == number)
      return true;  // otherwise it may have been overwritten meanwhile
  }
}

}  // namespace dynemb::cuda

DYNEMB_IMPLEMENT_OPS(m) { m.impl("reported_counts", TORCH_BOX(&dynemb::cuda::reported_counts)); }
