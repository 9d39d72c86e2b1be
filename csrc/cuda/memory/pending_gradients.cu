#include <algorithm>
#include <utility>

#include "core/runtime/error_class.h"
#include "cuda/memory/capture_headroom.h"
#include "cuda/memory/pending_gradients.h"

namespace dynemb::cuda {

PendingGradients::PendingGradients(SharedWords shared, std::vector<Growing> memory)
    : shared_(shared), slabs_(memory.size()) {
  for (size_t s = 0; s < slabs_.size(); ++s) slabs_[s].memory = std::move(memory[s]);
}

void PendingGradients::bind(const Call& call, const std::vector<int64_t>& counts) {
  std::vector<int64_t> need;
  for (size_t s = 0; s < slabs_.size(); ++s) {
    slabs_[s].entries = counts[2 * s];
    slabs_[s].lookups = counts[2 * s + 1];
    need.push_back(std::max<int64_t>(slabs_[s].entries, 1));
  }
  map(call, need);
}

std::vector<int64_t> PendingGradients::prepare_append(const Call& call, const MappedTables& tables,
                                                      const std::vector<bool>& touched,
                                                      int64_t ids) {
  const bool capturing = call.capturing();
  applied_ = false;
  std::vector<int64_t> merges(slabs_.size(), 0);
  std::vector<int64_t> need(slabs_.size(), 0);
  for (size_t s = 0; s < slabs_.size(); ++s) {
    if (!touched[s]) continue;
    Slab& slab = slabs_[s];
    if (capturing) {
      slab.captured_now += ids;
      need[s] = slab.entries + kReplaysOfHeadroom * slab.captured_now;
      continue;
    }
    slab.count_replays();
    // a lookup appends at most one entry per row
    const int64_t added = std::min(ids, tables.mapped_rows(s));
    if (slab.entries + added > slab.memory.capacity && slab.lookups > 1) {
      merges[s] = slab.entries;
      slab.note_merged(tables.mapped_rows(s));
    }
    slab.entries = std::min(slab.entries + added, slab.memory.capacity);
    ++slab.lookups;
    need[s] = slab.entries;
  }
  map(call, need);
  return merges;
}

std::vector<int64_t> PendingGradients::prepare_merge(const Call& call, const MappedTables& tables) {
  const bool capturing = call.capturing();
  std::vector<int64_t> bounds;
  for (size_t s = 0; s < slabs_.size(); ++s) {
    Slab& slab = slabs_[s];
    if (capturing) {  // the call may meet entries of its replays
      bounds.push_back(slab.memory.mapped);
      continue;
    }
    slab.count_replays();
    bounds.push_back(slab.lookups > 1 ? slab.entries : 0);
    slab.note_merged(tables.mapped_rows(s));
  }
  return bounds;
}

void PendingGradients::end_step() {
  if (!applied_) return;
  for (Slab& slab : slabs_) slab.entries = slab.lookups = 0;
  applied_ = false;
}

void PendingGradients::end_capture() {
  for (Slab& slab : slabs_) {
    slab.captured = std::max(slab.captured, slab.captured_now);
    slab.captured_now = 0;
  }
}

void PendingGradients::release(const Call& call) {
  const RelaxedCapture relaxed(call.op);
  for (size_t s = 0; s < slabs_.size(); ++s) {
    const int64_t entries = std::max<int64_t>(slabs_[s].entries, 1);
    volatile int64_t* limit = shared_.slab(static_cast<int64_t>(s)) + kSharedPendingLimit;
    *limit = std::min(entries, slabs_[s].memory.mapped);
    slabs_[s].memory.release(call.op, entries);
  }
}

void PendingGradients::map(const Call& call, const std::vector<int64_t>& entries) {
  int64_t bytes = 0;
  for (size_t s = 0; s < slabs_.size(); ++s) bytes += slabs_[s].memory.missing_bytes(entries[s]);
  const auto try_to_map = [&] {
    const RelaxedCapture relaxed(call.op);
    MappingAttempt attempt(side_stream(call.op, call.device));
    for (size_t s = 0; s < slabs_.size(); ++s) {
      if (attempt.map(call.op, &slabs_[s].memory, entries[s]) != Mapped::kYes) return false;
    }
    attempt.keep();
    return true;
  };
  bool complete = bytes == 0 || try_to_map();
  if (!complete) {
    empty_torch_cache();
    complete = try_to_map();
  }
  for (size_t s = 0; s < slabs_.size(); ++s) {
    shared_.slab(static_cast<int64_t>(s))[kSharedPendingLimit] = slabs_[s].memory.mapped;
  }
  DYNEMB_CHECK(complete, "dynemb::", call.op,
               ": out of GPU memory: gradients that wait for optimizer.step() need ",
               (bytes >> 20) + 1,
               " MiB more. Call optimizer.step() or zero_grad() more "
               "often, or torch.cuda.empty_cache()",
               kDeviceMemoryError);
}

// Replays may have appended entries that the host did not see.
void PendingGradients::Slab::count_replays() {
  if (captured == 0) return;
  entries = std::max(entries, memory.mapped);
  lookups = std::max<int64_t>(lookups, 2);
}

// `rows`: number of the slab's rows, an upper bound of the remaining entries.
void PendingGradients::Slab::note_merged(int64_t rows) {
  entries = std::min(entries, rows);
  lookups = std::min<int64_t>(lookups, 1);
}

}  // namespace dynemb::cuda
