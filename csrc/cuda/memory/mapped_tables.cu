#include <algorithm>
#include <utility>

#include "cuda/memory/mapped_tables.h"

namespace dynemb::cuda {
namespace {

// What calls needed in so many steps stays mapped; more is given back.
constexpr int64_t kStepsToRemember = 64;
// Less than this is not worth giving back.
constexpr int64_t kLeastRelease = int64_t{64} << 20;

}  // namespace

MappedTables::MappedTables(SharedWords shared, std::vector<Growing> tables,
                           std::vector<int64_t> slab_of_table, std::vector<Growing> slabs)
    : shared_(shared),
      tables_(std::move(tables)),
      slab_of_table_(slab_of_table.begin(), slab_of_table.end()),
      slabs_(std::move(slabs)) {}

std::vector<int64_t> MappedTables::handle_rows(bool captured) const {
  std::vector<int64_t> rows;
  for (const Growing& slab : slabs_) rows.push_back(captured ? slab.capacity : slab.mapped);
  return rows;
}

bool MappedTables::is_mapped(const TableRoom& room) const {
  for (size_t t = 0; t < tables_.size(); ++t) {
    if (!tables_[t].is_mapped(room.buckets[t])) return false;
  }
  for (size_t s = 0; s < slabs_.size(); ++s) {
    if (!slabs_[s].is_mapped(room.rows[s])) return false;
  }
  return true;
}

bool MappedTables::map(const Call& call, const TableRoom& room) {
  bool complete = true;
  if (!is_mapped(room)) {
    const RelaxedCapture relaxed(call.op);
    const cudaStream_t stream = side_stream(call.op, call.device);
    for (size_t t = 0; t < tables_.size(); ++t) {
      complete = tables_[t].map(call.op, room.buckets[t], stream) && complete;
    }
    for (size_t s = 0; s < slabs_.size(); ++s) {
      complete = slabs_[s].map(call.op, room.rows[s], stream) && complete;
    }
  }
  for (size_t t = 0; t < tables_.size(); ++t) {
    shared_.table(static_cast<int64_t>(t))[kSharedBucketLimit] = tables_[t].mapped;
  }
  for (size_t s = 0; s < slabs_.size(); ++s) {
    shared_.slab(static_cast<int64_t>(s))[kSharedRowLimit] = slabs_[s].mapped;
  }
  return complete;
}

void MappedTables::map_or_raise(const Call& call, const TableRoom& room, const char* what) {
  if (map(call, room)) return;
  size_t free_bytes = 0;
  size_t total = 0;
  check_cuda(call.op, "asking for free memory", cudaMemGetInfo(&free_bytes, &total));
  DYNEMB_CHECK(false, "dynemb::", call.op, ": out of GPU memory: ", what, " ",
               (missing_bytes(room) >> 20) + 1, " MiB, but the device has ", free_bytes >> 20,
               " MiB left; no id was inserted. Call torch.cuda.empty_cache(), erase ids, or "
               "use a GPU with more memory");
}

int64_t MappedTables::missing_bytes(const TableRoom& room) const {
  int64_t bytes = 0;
  for (size_t t = 0; t < tables_.size(); ++t) bytes += tables_[t].missing_bytes(room.buckets[t]);
  for (size_t s = 0; s < slabs_.size(); ++s) bytes += slabs_[s].missing_bytes(room.rows[s]);
  return bytes;
}

void MappedTables::keep() {
  for (Growing& table : tables_) table.keep();
  for (Growing& slab : slabs_) slab.keep();
}

void MappedTables::need(const TableRoom& room) {
  for (size_t t = 0; t < tables_.size(); ++t) tables_[t].need(room.buckets[t]);
  for (size_t s = 0; s < slabs_.size(); ++s) slabs_[s].need(room.rows[s]);
}

void MappedTables::end_step(const Call& call, bool idle) {
  if (++steps_of_period_ < kStepsToRemember || !idle || call.capturing()) return;
  steps_of_period_ = 0;
  for (size_t t = 0; t < tables_.size(); ++t) {
    volatile int64_t* shared = shared_.table(static_cast<int64_t>(t));
    shrink(call, &tables_[t], tables_[t].memory.size(), shared[kSharedBucketCount],
           shared + kSharedBucketLimit);
  }
  for (size_t s = 0; s < slabs_.size(); ++s) {
    volatile int64_t* shared = shared_.slab(static_cast<int64_t>(s));
    shrink(call, &slabs_[s], kGenerationMemory, shared[kSharedNextRow], shared + kSharedRowLimit);
  }
}

void MappedTables::shrink(const Call& call, Growing* growing, size_t spared, int64_t held,
                          volatile int64_t* limit) {
  const int64_t rows = growing->useful(held);
  if ((growing->mapped - rows) * growing->row_bytes() >= kLeastRelease) {
    *limit = rows;
    growing->release(call.op, rows, spared);
  }
  growing->begin_period();
}

void MappedTables::release(const Call& call, const TableRoom& room) {
  for (size_t t = 0; t < tables_.size(); ++t) {
    tables_[t].release(call.op, std::max<int64_t>(room.buckets[t], 1));
  }
  for (size_t s = 0; s < slabs_.size(); ++s) {
    slabs_[s].release(call.op, std::max<int64_t>(room.rows[s], 1), kGenerationMemory);
  }
}

}  // namespace dynemb::cuda
