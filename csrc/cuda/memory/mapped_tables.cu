#include <algorithm>
#include <cstdlib>
#include <utility>

#include "core/runtime/error_class.h"
#include "cuda/memory/mapped_tables.h"

namespace dynemb::cuda {
namespace {

// Memory needed within so many steps stays mapped; more is given back.
constexpr int64_t kStepsToRemember = 64;
// Smaller amounts are not given back.
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
  for (size_t s = 0; s < slabs_.size(); ++s) {
    rows.push_back(most_slots(s) + (captured ? slabs_[s].capacity : slabs_[s].mapped));
  }
  return rows;
}

void MappedTables::split_rows(const std::vector<size_t>& slabs, std::shared_ptr<RowBudget> budget) {
  budget_ = std::move(budget);
  for (const size_t s : slabs) {
    const std::vector<RowMemory>& memory = slabs_[s].memory;
    for (size_t k = 0; k < memory.size(); ++k) {
      const bool words = k == kGenerationMemory || k == kFreeRowMemory;
      if (!words && memory[k].row_bytes >= kLeastSplitBytes) {
        memory[k].reservation->set_budget(budget_);
      }
    }
  }
}

void MappedTables::cache_rows(const Call& call, const std::vector<CacheMemory>& caches,
                              std::shared_ptr<RowBudget> budget) {
  std::vector<size_t> slabs;
  for (const CacheMemory& cache : caches) slabs.push_back(cache.slab);
  split_rows(slabs, std::move(budget));
  slots_.resize(slabs_.size());
  TableRoom room = no_room();
  for (const CacheMemory& cache : caches) {
    Growing& rows = slabs_[cache.slab];
    Growing& slots = slots_[cache.slab];
    slots.capacity = cache.slots;
    slots.memory = cache.of_slot;
    for (size_t k = 0; k < rows.memory.size(); ++k) {
      if (k == kFreeRowMemory) continue;
      slots.memory.push_back(rows.memory[k]);
      slots.memory.back().in_hbm = true;
      if (cache.has_homes) {
        rows.memory[k].begin += cache.slots * rows.memory[k].row_bytes;
      } else {
        rows.memory[k].row_bytes = 0;
      }
    }
    has_homes_ = cache.has_homes;
    rows.memory.push_back(cache.places);
    rows.capacity = cache.rows;
    rows.mapped = 0;
    room.rows[cache.slab] = 1;  // as bind() maps
  }
  map_or_raise(call, room, "the first rows need");
  keep();
}

bool MappedTables::map_slots(const Call& call, size_t slab, int64_t slots) {
  if (slots_[slab].is_mapped(slots)) return true;
  const RelaxedCapture relaxed(call.op);
  MappingAttempt attempt(side_stream(call.op, call.device));
  last_attempt_ = attempt.map(call.op, &slots_[slab], slots);
  if (last_attempt_ != Mapped::kYes) return false;
  attempt.keep();
  return true;
}

void MappedTables::raise_short_memory(const Call& call, int64_t bytes, const char* what) const {
  const int64_t missing = (bytes >> 20) + 1;
  const bool cached = !slots_.empty();
  if (last_attempt_ == Mapped::kHostIsFull && cached) {
    DYNEMB_CHECK(false, "dynemb::", call.op, ": out of host memory: ", what, " ", missing,
                 " MiB, but ", budget_->host_left() >> 20,
                 " MiB of host memory are left; no id was inserted. Give HostStore a larger host, "
                 "erase ids, or use a machine with more memory",
                 kHostMemoryError);
  }
  if (last_attempt_ == Mapped::kHostIsFull) {
    DYNEMB_CHECK(false, "dynemb::", call.op, ": out of host memory: ", what, " ", missing,
                 " MiB, of which HBM gets the ", budget_->limits().hbm >> 20,
                 " MiB that storage allows, but ", budget_->host_left() >> 20,
                 " MiB of host memory are left; no id was inserted. Give HostStore a larger hbm or "
                 "host, erase ids, or use a machine with more memory",
                 kHostMemoryError);
  }
  size_t free_bytes = 0;
  size_t total = 0;
  check_cuda(call.op, "asking for free memory", cudaMemGetInfo(&free_bytes, &total));
  DYNEMB_CHECK(false, "dynemb::", call.op, ": out of GPU memory: ", what, " ", missing,
               " MiB, but the device has ", free_bytes >> 20,
               " MiB left; no id was inserted. Call torch.cuda.empty_cache(), erase ids, ",
               budget_ == nullptr ? "give the tables storage=torch_dynemb.HostStore(...)"
               : !cached          ? "give HostStore a smaller hbm"
               : has_homes_       ? "give HostStore a smaller cache"
                                  : "give storage a smaller device_cache",
               ", or use a GPU with more memory", kDeviceMemoryError);
  std::abort();  // the check has thrown
}

void MappedTables::add_rows(const Call& call, size_t slab, const RowMemory& part) {
  Growing& rows = slabs_[slab];
  const int64_t slots = most_slots(slab);
  RowMemory homes = part;  // or all rows
  homes.begin += slots * part.row_bytes;
  for (const RowMemory& known : rows.memory) {
    if (known.reservation == homes.reservation && known.begin == homes.begin) return;
  }
  const RelaxedCapture relaxed(call.op);
  MappingAttempt attempt(side_stream(call.op, call.device));
  last_attempt_ = attempt.map_part(call.op, homes, 0, rows.mapped);
  if (last_attempt_ == Mapped::kYes && slots > 0) {
    last_attempt_ = attempt.map_part(call.op, part, 0, mapped_slots(slab));
  }
  if (last_attempt_ != Mapped::kYes) {
    raise_short_memory(call, (rows.mapped + mapped_slots(slab)) * part.row_bytes,
                       "another tensor of the rows needs");
  }
  rows.memory.push_back(homes);
  if (slots > 0) slots_[slab].memory.push_back(part);
  attempt.keep();
}

void MappedTables::map_first_slots(const Call& call, size_t slab, int64_t slots) {
  if (map_slots(call, slab, slots)) return;
  empty_torch_cache();
  if (map_slots(call, slab, slots)) return;
  raise_short_memory(call, slots_[slab].missing_bytes(slots), "the cache of rows needs");
}

void MappedTables::release_slots(const Call& call, size_t slab, int64_t slots) {
  const RelaxedCapture relaxed(call.op);
  slots_[slab].release(call.op, slots);
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
  if (!is_mapped(room)) {
    const RelaxedCapture relaxed(call.op);
    MappingAttempt attempt(side_stream(call.op, call.device));
    last_attempt_ = Mapped::kYes;
    for (size_t t = 0; last_attempt_ == Mapped::kYes && t < tables_.size(); ++t) {
      last_attempt_ = attempt.map(call.op, &tables_[t], room.buckets[t]);
    }
    for (size_t s = 0; last_attempt_ == Mapped::kYes && s < slabs_.size(); ++s) {
      last_attempt_ = attempt.map(call.op, &slabs_[s], room.rows[s]);
    }
    if (last_attempt_ != Mapped::kYes) return false;
    attempt.keep();
  }
  write_limits();
  return true;
}

void MappedTables::write_limits() {
  for (size_t t = 0; t < tables_.size(); ++t) {
    shared_.table(static_cast<int64_t>(t))[kSharedBucketLimit] = tables_[t].mapped;
  }
  for (size_t s = 0; s < slabs_.size(); ++s) {
    shared_.slab(static_cast<int64_t>(s))[kSharedRowLimit] = slabs_[s].mapped;
  }
}

void MappedTables::map_or_raise(const Call& call, const TableRoom& room, const char* what) {
  if (map(call, room)) return;
  empty_torch_cache();
  if (!map(call, room)) raise_short_memory(call, missing_bytes(room), what);
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

void MappedTables::end_step(const Call& call, const TableRoom& held) {
  if (++steps_of_period_ < kStepsToRemember || call.capturing()) return;
  steps_of_period_ = 0;
  const RelaxedCapture relaxed(call.op);  // another thread may capture
  for (size_t t = 0; t < tables_.size(); ++t) {
    shrink(call, &tables_[t], tables_[t].memory.size(), held.buckets[t],
           shared_.table(static_cast<int64_t>(t)) + kSharedBucketLimit);
  }
  for (size_t s = 0; s < slabs_.size(); ++s) {
    shrink(call, &slabs_[s], kGenerationMemory, held.rows[s],
           shared_.slab(static_cast<int64_t>(s)) + kSharedRowLimit);
  }
}

// Unfinished calls use nothing beyond `held`, so this does not wait.
void MappedTables::shrink(const Call& call, Growing* growing, size_t spared, int64_t held,
                          volatile int64_t* limit) {
  const int64_t rows = growing->useful(held);
  growing->begin_period();
  if ((growing->mapped - rows) * growing->row_bytes() < kLeastRelease) return;
  *limit = rows;  // before the driver may refuse
  growing->release(call.op, rows, spared);
}

void MappedTables::release(const Call& call, const TableRoom& room) {
  const RelaxedCapture relaxed(call.op);
  for (size_t t = 0; t < tables_.size(); ++t) {
    const int64_t buckets = std::max<int64_t>(room.buckets[t], 1);
    volatile int64_t* limit = shared_.table(static_cast<int64_t>(t)) + kSharedBucketLimit;
    *limit = std::min(buckets, tables_[t].mapped);
    tables_[t].release(call.op, buckets);
  }
  for (size_t s = 0; s < slabs_.size(); ++s) {
    const int64_t rows = std::max<int64_t>(room.rows[s], 1);
    volatile int64_t* limit = shared_.slab(static_cast<int64_t>(s)) + kSharedRowLimit;
    *limit = std::min(rows, slabs_[s].mapped);
    slabs_[s].release(call.op, rows, kGenerationMemory);
  }
}

}  // namespace dynemb::cuda
