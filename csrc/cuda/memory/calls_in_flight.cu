#include <algorithm>
#include <atomic>
#include <iterator>
#include <thread>
#include <utility>

#include "cuda/memory/calls_in_flight.h"
#include "cuda/memory/reservation.h"

namespace dynemb::cuda {
namespace {

constexpr int64_t kLooksPerQuery = 64;

}  // namespace

int64_t CallsInFlight::add(int64_t ids, std::vector<bool> tables, std::vector<bool> slabs) {
  most_ids_ = std::max(most_ids_, ids);
  insertions_.push_back({++last_number_, ids, std::move(tables), std::move(slabs)});
  return last_number_;
}

void CallsInFlight::note_erasure(int64_t ids) { erasures_.push_back({last_number_ + 1, ids}); }

void CallsInFlight::note_rehash(size_t table, int64_t buckets, int64_t steps) {
  rehashes_[table] = {buckets, steps};
}

void CallsInFlight::end_step() {
  for (auto rehash = rehashes_.begin(); rehash != rehashes_.end();) {
    rehash = --rehash->second.steps > 0 ? std::next(rehash) : rehashes_.erase(rehash);
  }
}

void CallsInFlight::forget() {
  insertions_.clear();
  erasures_.clear();
  rehashes_.clear();
}

void CallsInFlight::confirm() {
  int64_t finished = *finished_;
#if defined(DYNEMB_EMULATED)
  finished -= emulator_calls_behind();
#endif
  std::atomic_thread_fence(std::memory_order_acquire);  // the counts were written before it
  while (!erasures_.empty() && erasures_.front().before <= finished) erasures_.pop_front();
  while (!insertions_.empty() && insertions_.front().number <= finished) insertions_.pop_front();
}

bool CallsInFlight::wait_for_oldest(const Call& call) {
  const size_t unfinished = insertions_.size();
  const RelaxedCapture relaxed(call.op);
  bool idle = false;
  for (int64_t look = 0;; ++look) {
    confirm();
    if (insertions_.size() < unfinished) return true;
    if (idle) return false;
    // reading a word of host memory costs nothing in the driver; the stream is asked now and then
    if (look % kLooksPerQuery != 0) {
      std::this_thread::yield();
      continue;
    }
    const cudaError_t status = cudaStreamQuery(call.stream);
    idle = status == cudaSuccess;  // the call may have finished just now: look once more
    if (status == cudaErrorNotReady) {
      cudaGetLastError();
    } else {
      check_cuda(call.op, "waiting for an earlier call", status);
    }
  }
}

int64_t CallsInFlight::ids_of_table(size_t table) const {
  int64_t ids = 0;
  for (const Insertion& insertion : insertions_) ids += insertion.tables[table] ? insertion.ids : 0;
  return ids;
}

int64_t CallsInFlight::ids_of_slab(size_t slab) const {
  int64_t ids = 0;
  for (const Insertion& insertion : insertions_) ids += insertion.slabs[slab] ? insertion.ids : 0;
  return ids;
}

int64_t CallsInFlight::rehashed_buckets(size_t table) const {
  const auto rehash = rehashes_.find(table);
  return rehash == rehashes_.end() ? 0 : rehash->second.buckets;
}

int64_t CallsInFlight::erased_ids() const {
  int64_t ids = 0;
  for (const Erasure& erasure : erasures_) ids += erasure.ids;
  return ids;
}

}  // namespace dynemb::cuda
