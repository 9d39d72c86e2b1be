// Ops on stores of rows.
#include <torch/csrc/stable/library.h>

#include <cstring>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "arguments/storage.h"
#include "core/columns.h"
#include "core/storage/record.h"
#include "cpu/runtime/results.h"
#include "cpu/storage/registry.h"
#include "cpu/storage/row_store.h"

namespace dynemb::cpu {
namespace {

// Two for the log, one for garbage collection, one that is ready.
constexpr int64_t kLeastSegments = 4;

const int64_t* words(const Tensor& tensor) {
  return static_cast<const int64_t*>(tensor.data_ptr());
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines(1);
  for (const char character : text) {
    if (character == '\n') {
      lines.emplace_back();
    } else {
      lines.back() += character;
    }
  }
  return lines;
}

// Names become names of directories, and are written to JSON.
void check_names(const char* op, const std::vector<std::string>& names, size_t slabs) {
  DYNEMB_CHECK(names.size() == slabs, "dynemb::", op, ": names has ", names.size(),
               " lines, expected one for each of ", slabs, " slabs");
  std::set<std::string> seen;
  for (const std::string& name : names) {
    const bool legal = !name.empty() && name[0] != '.' &&
                       name.find_first_not_of(
                           "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") ==
                           std::string::npos;
    DYNEMB_CHECK(legal, "dynemb::", op, ": names has '", name,
                 "', expected letters, digits, '.', '_' and '-', not beginning with '.'");
    DYNEMB_CHECK(seen.insert(name).second, "dynemb::", op, ": names has '", name, "' twice");
  }
}

RowPart part_of(const Tensor& tensor) {
  return {static_cast<char*>(tensor.data_ptr()),
          tensor.numel() / tensor.size(0) * static_cast<int64_t>(tensor.element_size())};
}

std::vector<CachedSlab> cached_slabs(const CacheTensors& cache, const int64_t* tiered,
                                     const std::vector<std::string>& names) {
  const size_t slabs = cache.weights.size();
  std::vector<CachedSlab> cached(slabs);
  for (size_t s = 0; s < slabs; ++s) {
    cached[s].name = names[s];
    if (tiered[s] == 0) continue;
    cached[s].parts.push_back(part_of(cache.weights[s]));
    for (size_t i = s; i < cache.state.size(); i += slabs) {
      cached[s].parts.push_back(part_of(cache.state[i]));
    }
    cached[s].generations = static_cast<int32_t*>(cache.generations[s].data_ptr());
    cached[s].max_rows = cache.places[s].numel();
  }
  return cached;
}

void check_sizes(const char* op, const std::vector<CachedSlab>& slabs, int64_t segment_bytes,
                 int64_t disk_bytes) {
  DYNEMB_CHECK(
      segment_bytes > 0 && segment_bytes % kPageBytes == 0 && segment_bytes <= int64_t{1} << 32,
      "dynemb::", op, ": segment_bytes is ", segment_bytes, ", expected a multiple of ", kPageBytes,
      " up to ", int64_t{1} << 32);
  int64_t stored = 0;
  for (const CachedSlab& slab : slabs) {
    if (!slab.is_stored()) continue;
    ++stored;
    const SegmentLayout layout{slab.record(), segment_bytes};
    DYNEMB_CHECK(layout.records_per_segment() > 0, "dynemb::", op, ": segment_bytes is ",
                 segment_bytes, ", which has no room for a record of ", slab.record(),
                 " bytes, those of slab ", slab.name, ": give at least ",
                 (1 + layout.pages_per_record()) * kPageBytes);
  }
  DYNEMB_CHECK(stored > 0, "dynemb::", op, ": tiered is 0 for every slab, expected one to store");
  const int64_t least = kLeastSegments * stored * segment_bytes;
  DYNEMB_CHECK(disk_bytes == 0 || disk_bytes >= least, "dynemb::", op, ": disk_bytes is ",
               disk_bytes, ", expected 0 (no bound) or at least ", least, ", which is ",
               kLeastSegments, " segments of ", segment_bytes, " bytes for each of ", stored,
               " slabs");
}

std::vector<TensorPlace> places_of(const std::vector<Tensor>& tensors) {
  std::vector<TensorPlace> places;
  places.reserve(tensors.size());
  for (const Tensor& tensor : tensors) places.push_back(place_of(tensor));
  return places;
}

void store_open(Tensor tier_clock, Tensor path, std::vector<Tensor> places,
                std::vector<Tensor> slots, std::vector<Tensor> free_slots,
                std::vector<Tensor> weights, std::vector<Tensor> generations,
                std::vector<Tensor> state, Tensor tiered, Tensor names, int64_t segment_bytes,
                int64_t disk_bytes, int64_t io) {
  constexpr const char* kOp = "store_open";
  check_tier_clock(kOp, tier_clock);
  const CacheTensors cache{places, slots, free_slots, weights, generations, state};
  check_cache_tensors(kOp, tier_clock, cache, tiered);
  const std::vector<std::string> slab_names = lines_of(text_of(kOp, "names", names));
  check_names(kOp, slab_names, weights.size());
  const std::string directory = checked_path(kOp, path);
  DYNEMB_CHECK(io >= 0 && io < kIoPaths, "dynemb::", kOp, ": io is ", io,
               ", expected 0 (either), 1 (io_uring) or 2 (threads)");
  std::vector<CachedSlab> cached = cached_slabs(cache, words(tiered), slab_names);
  check_sizes(kOp, cached, segment_bytes, disk_bytes);
  RegisteredStore entry{nullptr,
                        places_of(places),
                        places_of(slots),
                        places_of(free_slots),
                        places_of(weights),
                        places_of(generations),
                        places_of(state),
                        {}};
  for (const CachedSlab& slab : cached) {
    entry.record_bytes.push_back(slab.is_stored() ? slab.record() : 0);
  }
  entry.store = RowStore::open({directory, segment_bytes, disk_bytes, static_cast<IoPath>(io)},
                               std::move(cached));
  register_store(kOp, tier_clock, std::move(entry));
}

// Record size of a slab with a log, for ops on its records.
int64_t stored_record_bytes(const char* op, const RegisteredStore& entry, int64_t slab) {
  check_slab(op, slab, entry.slabs());
  const int64_t bytes = entry.record_bytes[slab];
  DYNEMB_CHECK(bytes > 0, "dynemb::", op, ": slab is ", slab,
               ", expected one with a log: all rows of this slab are in memory");
  return bytes;
}

std::vector<RowMove> moves_of(const Tensor& handles, const Tensor& ids, int64_t table) {
  std::vector<RowMove> moves(static_cast<size_t>(handles.numel()));
  for (size_t i = 0; i < moves.size(); ++i) {
    moves[i] = {0, words(handles)[i], words(ids)[i], static_cast<int32_t>(table), 0};
  }
  return moves;
}

// `pin`: the records as they were when they were pinned.
std::tuple<Tensor, Tensor> store_read(Tensor tier_clock, int64_t slab, Tensor handles, Tensor ids,
                                      std::optional<int64_t> pin) {
  constexpr const char* kOp = "store_read";
  const auto entry = registered_store(kOp, tier_clock);
  const int64_t bytes = stored_record_bytes(kOp, *entry, slab);
  check_stored_rows(kOp, handles, ids, entry->places[slab].size[0]);
  Tensor records = zeros_cpu({handles.numel(), bytes}, ScalarType::Byte);
  Tensor found = zeros_cpu({handles.numel()}, ScalarType::Bool);
  const auto moves = moves_of(handles, ids, 0);
  auto* to = static_cast<char*>(records.data_ptr());
  auto* is_found = static_cast<uint8_t*>(found.data_ptr());
  if (pin.has_value()) {
    entry->store->read_pinned(*pin, static_cast<size_t>(slab), moves, to, is_found);
  } else {
    entry->store->read(static_cast<size_t>(slab), moves, to, is_found);
  }
  return {records, found};
}

void store_write(Tensor tier_clock, int64_t slab, Tensor handles, Tensor ids, int64_t table,
                 Tensor records) {
  constexpr const char* kOp = "store_write";
  const auto entry = registered_store(kOp, tier_clock);
  const int64_t bytes = stored_record_bytes(kOp, *entry, slab);
  check_stored_rows(kOp, handles, ids, entry->places[slab].size[0]);
  DYNEMB_CHECK(table >= 0 && table <= INT32_MAX, "dynemb::", kOp, ": table is ", table,
               ", expected 0 to ", INT32_MAX);
  check_tensor(kOp, "records", records, ScalarType::Byte);
  check_size(kOp, "records", records, 0, handles.numel());
  check_size(kOp, "records", records, 1, bytes);
  entry->store->write(static_cast<size_t>(slab), moves_of(handles, ids, table),
                      static_cast<const char*>(records.data_ptr()));
}

void store_erase(Tensor tier_clock, int64_t slab, Tensor handles) {
  constexpr const char* kOp = "store_erase";
  const auto entry = registered_store(kOp, tier_clock);
  stored_record_bytes(kOp, *entry, slab);
  check_stored_rows(kOp, handles, handles, entry->places[slab].size[0]);
  entry->store->erase(static_cast<size_t>(slab),
                      {words(handles), words(handles) + handles.numel()});
}

void store_drain(Tensor tier_clock) { registered_store("store_drain", tier_clock)->store->drain(); }

void store_check(Tensor tier_clock) { registered_store("store_check", tier_clock)->store->check(); }

Tensor tensor_of(const std::vector<int64_t>& values) {
  Tensor tensor = empty_cpu({static_cast<int64_t>(values.size())}, ScalarType::Long);
  if (!values.empty()) {
    std::memcpy(tensor.data_ptr(), values.data(), values.size() * sizeof(int64_t));
  }
  return tensor;
}

std::tuple<std::vector<Tensor>, std::vector<Tensor>> store_sync(Tensor tier_clock) {
  std::vector<Tensor> records;
  std::vector<Tensor> segments;
  const std::vector<SlabSnapshot> snapshot =
      registered_store("store_sync", tier_clock)->store->sync();
  for (const SlabSnapshot& slab : snapshot) {
    records.push_back(tensor_of(slab.records));
    segments.push_back(tensor_of(slab.segments));
  }
  return {records, segments};
}

// A vector of int64 for each slab.
std::vector<std::vector<int64_t>> slab_values(const char* op, const char* name,
                                              const RegisteredStore& entry,
                                              const std::vector<Tensor>& list) {
  DYNEMB_CHECK(static_cast<int64_t>(list.size()) == entry.slabs(), "dynemb::", op, ": ", name,
               " has ", list.size(), " tensors, expected one for each of ", entry.slabs(),
               " slabs");
  std::vector<std::vector<int64_t>> values;
  for (size_t s = 0; s < list.size(); ++s) {
    check_words(op, entry_name(name, s).c_str(), list[s]);
    values.emplace_back(words(list[s]), words(list[s]) + list[s].numel());
  }
  return values;
}

void store_keep(Tensor tier_clock, std::vector<Tensor> files) {
  constexpr const char* kOp = "store_keep";
  const auto entry = registered_store(kOp, tier_clock);
  entry->store->keep(slab_values(kOp, "files", *entry, files));
}

void store_load(Tensor tier_clock, std::vector<Tensor> records, std::vector<Tensor> segments) {
  constexpr const char* kOp = "store_load";
  const auto entry = registered_store(kOp, tier_clock);
  auto rows = slab_values(kOp, "records", *entry, records);
  auto files = slab_values(kOp, "segments", *entry, segments);
  std::vector<SlabSnapshot> snapshot(rows.size());
  for (size_t s = 0; s < rows.size(); ++s) snapshot[s] = {std::move(rows[s]), std::move(files[s])};
  entry->store->load(snapshot);
}

Tensor store_pin(Tensor tier_clock) {
  const auto entry = registered_store("store_pin", tier_clock);
  Tensor number = zeros_cpu({}, ScalarType::Long);
  *static_cast<int64_t*>(number.data_ptr()) = entry->store->pin();
  return number;
}

void store_release(Tensor tier_clock, int64_t pin) {
  registered_store("store_release", tier_clock)->store->release(pin);
}

Tensor store_stats(Tensor tier_clock) {
  const StoreStats stats = registered_store("store_stats", tier_clock)->store->stats();
  Tensor columns = zeros_cpu({kStoreStatColumns}, ScalarType::Long);
  auto* column = static_cast<int64_t*>(columns.data_ptr());
  column[kStoreStatReads] = stats.reads;
  column[kStoreStatBytesRead] = stats.bytes_read;
  column[kStoreStatWrites] = stats.writes;
  column[kStoreStatBytesWritten] = stats.bytes_written;
  column[kStoreStatCollected] = stats.collected;
  column[kStoreStatLiveRecords] = stats.live_records;
  column[kStoreStatSegments] = stats.segments;
  column[kStoreStatPinnedSegments] = stats.pinned_segments;
  column[kStoreStatDiskBytes] = stats.disk_bytes;
  column[kStoreStatQueued] = stats.queued;
  column[kStoreStatMostQueued] = stats.most_queued;
  column[kStoreStatWaitedUs] = stats.waited_us;
  column[kStoreStatIo] = stats.io;
  return columns;
}

void store_close(Tensor tier_clock) { unregister_store("store_close", tier_clock); }

}  // namespace
}  // namespace dynemb::cpu

#define DYNEMB_STORE_OPS(m)                                        \
  m.impl("store_open", TORCH_BOX(&dynemb::cpu::store_open));       \
  m.impl("store_read", TORCH_BOX(&dynemb::cpu::store_read));       \
  m.impl("store_write", TORCH_BOX(&dynemb::cpu::store_write));     \
  m.impl("store_drain", TORCH_BOX(&dynemb::cpu::store_drain));     \
  m.impl("store_erase", TORCH_BOX(&dynemb::cpu::store_erase));     \
  m.impl("store_check", TORCH_BOX(&dynemb::cpu::store_check));     \
  m.impl("store_sync", TORCH_BOX(&dynemb::cpu::store_sync));       \
  m.impl("store_keep", TORCH_BOX(&dynemb::cpu::store_keep));       \
  m.impl("store_load", TORCH_BOX(&dynemb::cpu::store_load));       \
  m.impl("store_pin", TORCH_BOX(&dynemb::cpu::store_pin));         \
  m.impl("store_release", TORCH_BOX(&dynemb::cpu::store_release)); \
  m.impl("store_stats", TORCH_BOX(&dynemb::cpu::store_stats));     \
  m.impl("store_close", TORCH_BOX(&dynemb::cpu::store_close))

STABLE_TORCH_LIBRARY_IMPL(dynemb, CPU, m) { DYNEMB_STORE_OPS(m); }

// For error messages about a GPU's tensor, also in builds without CUDA kernels.
STABLE_TORCH_LIBRARY_IMPL(dynemb, CUDA, m) { DYNEMB_STORE_OPS(m); }
