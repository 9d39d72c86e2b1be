#include "arguments/storage.h"

#include "core/columns.h"
#include "core/index/handle.h"
#include "core/storage/record.h"

namespace dynemb {

void check_in_host_memory(const char* op, const char* name, const Tensor& tensor) {
  check_defined(op, name, tensor);
  DYNEMB_CHECK(tensor.is_cpu(), "dynemb::", op, ": ", name, " is on ", device_name(tensor),
               ", but ", op, " reads files to host memory: copy to the CPU first, with .cpu()");
}

void check_summed_bytes(const char* op, const Tensor& data, int64_t crc) {
  check_defined(op, "data", data);
  DYNEMB_CHECK(data.is_cpu(), "dynemb::", op, ": data is on ", device_name(data), ", but ", op,
               " sums bytes in host memory: copy to the CPU first, with .cpu()");
  DYNEMB_CHECK(data.is_contiguous(), "dynemb::", op,
               ": data is not contiguous: call .contiguous()");
  DYNEMB_CHECK(crc >= 0 && crc <= UINT32_MAX, "dynemb::", op, ": crc is ", crc, ", expected 0 to ",
               UINT32_MAX, ", the sum so far");
}

std::string checked_path(const char* op, const Tensor& path) {
  check_in_host_memory(op, "path", path);
  check_layout(op, "path", path, ScalarType::Byte);
  DYNEMB_CHECK(path.dim() == 1, "dynemb::", op, ": path has ", path.dim(),
               " dimensions, expected 1");
  std::string text(static_cast<const char*>(path.data_ptr()), static_cast<size_t>(path.numel()));
  DYNEMB_CHECK(!text.empty(), "dynemb::", op, ": path is empty, expected the bytes of a path");
  DYNEMB_CHECK(text.find('\0') == std::string::npos, "dynemb::", op, ": path has a zero at ",
               text.find('\0'), ", which no path has");
  return text;
}

void check_blocks(const char* op, const Tensor& offsets, int64_t block_bytes) {
  check_in_host_memory(op, "offsets", offsets);
  check_words(op, "offsets", offsets);
  DYNEMB_CHECK(block_bytes > 0 && block_bytes % kPageBytes == 0, "dynemb::", op,
               ": block_bytes is ", block_bytes, ", expected a multiple of ", kPageBytes);
  const int64_t count = offsets.numel();
  const auto* offset = static_cast<const int64_t*>(offsets.data_ptr());
  for (int64_t i = 0; i < count; ++i) {
    DYNEMB_CHECK(offset[i] >= 0 && offset[i] % kPageBytes == 0, "dynemb::", op, ": offsets[", i,
                 "] is ", offset[i], ", expected a multiple of ", kPageBytes);
  }
  result_bytes(op, "block_bytes", block_bytes, {count, block_bytes}, 1);
}

namespace {

// Raises unless a tensor of a slab has a row for each slot.
void check_cached(const char* op, const char* name, size_t i, const Tensor& tensor, int64_t rows) {
  const std::string entry = entry_name(name, i);
  check_tensor(op, entry.c_str(), tensor, tensor.scalar_type());
  check_size(op, entry.c_str(), tensor, 0, rows);
}

void check_slabs(const char* op, const char* name, const std::vector<Tensor>& list, size_t slabs) {
  DYNEMB_CHECK(list.size() == slabs, "dynemb::", op, ": ", name, " has ", list.size(),
               " tensors, expected one for each of ", slabs, " slabs");
  for (size_t s = 0; s < slabs; ++s) check_defined(op, name, s, list[s]);
}

}  // namespace

void check_tier_clock(const char* op, const Tensor& tier_clock) {
  check_defined(op, "tier_clock", tier_clock);
  DYNEMB_CHECK(tier_clock.is_cpu(), "dynemb::", op, ": tier_clock is on ", device_name(tier_clock),
               ", but ", op,
               " stores rows of host memory: tables with rows on a disk have to be on the CPU");
  check_layout(op, "tier_clock", tier_clock, ScalarType::Long);
  check_size(op, "tier_clock", tier_clock, 1, kTierColumns);
}

void check_cache_tensors(const char* op, const Tensor& tier_clock, const CacheTensors& cache,
                         const Tensor& tiered) {
  const size_t slabs = cache.weights.size();
  DYNEMB_CHECK(slabs > 0, "dynemb::", op, ": weights has no tensors, expected one for each slab");
  check_size(op, "tier_clock", tier_clock, 0, static_cast<int64_t>(slabs) + 1);
  check_words(op, "tiered", tiered);
  check_length(op, "tiered", tiered, static_cast<int64_t>(slabs));
  check_slabs(op, "weights", cache.weights, slabs);
  check_slabs(op, "places", cache.places, slabs);
  check_slabs(op, "slots", cache.slots, slabs);
  check_slabs(op, "free_slots", cache.free_slots, slabs);
  check_slabs(op, "generations", cache.generations, slabs);
  DYNEMB_CHECK(cache.state.size() % slabs == 0, "dynemb::", op, ": state has ", cache.state.size(),
               " tensors, expected a multiple of the ", slabs, " slabs");
  for (size_t s = 0; s < slabs; ++s) {
    if (static_cast<const int64_t*>(tiered.data_ptr())[s] == 0) continue;
    const std::string name = entry_name("weights", s);
    DYNEMB_CHECK(cache.weights[s].dim() == 2, "dynemb::", op, ": ", name, " has ",
                 cache.weights[s].dim(), " dimensions, expected 2");
    const int64_t rows = cache.weights[s].size(0);
    DYNEMB_CHECK(rows > 0 && rows <= INT32_MAX, "dynemb::", op, ": ", name, " has ", rows,
                 " rows, expected 1 to ", INT32_MAX);
    check_cached(op, "weights", s, cache.weights[s], rows);
    const std::string places = entry_name("places", s);
    check_tensor(op, places.c_str(), cache.places[s], ScalarType::Int);
    DYNEMB_CHECK(cache.places[s].dim() == 1 && cache.places[s].numel() > 0, "dynemb::", op, ": ",
                 places, " has ", cache.places[s].dim(), " dimensions and ",
                 cache.places[s].numel(), " elements, expected one for each row of slab ", s);
    check_cached(op, "slots", s, cache.slots[s], rows);
    check_layout(op, entry_name("slots", s).c_str(), cache.slots[s], ScalarType::Long);
    check_size(op, entry_name("slots", s).c_str(), cache.slots[s], 1, kSlotColumns);
    const std::string free_slots = entry_name("free_slots", s);
    check_tensor(op, free_slots.c_str(), cache.free_slots[s], ScalarType::Int);
    check_length(op, free_slots.c_str(), cache.free_slots[s], rows);
    check_cached(op, "generations", s, cache.generations[s], rows);
    check_layout(op, entry_name("generations", s).c_str(), cache.generations[s], ScalarType::Int);
    check_length(op, entry_name("generations", s).c_str(), cache.generations[s], rows);
    for (size_t i = s; i < cache.state.size(); i += slabs) {
      check_defined(op, "state", i, cache.state[i]);
      check_cached(op, "state", i, cache.state[i], rows);
    }
  }
}

std::string text_of(const char* op, const char* name, const Tensor& text) {
  check_tensor(op, name, text, ScalarType::Byte);
  DYNEMB_CHECK(text.dim() == 1, "dynemb::", op, ": ", name, " has ", text.dim(),
               " dimensions, expected 1");
  return {static_cast<const char*>(text.data_ptr()), static_cast<size_t>(text.numel())};
}

void check_slab(const char* op, int64_t slab, int64_t slabs) {
  DYNEMB_CHECK(slab >= 0 && slab < slabs, "dynemb::", op, ": slab is ", slab, ", expected 0 to ",
               slabs - 1);
}

void check_stored_rows(const char* op, const Tensor& handles, const Tensor& ids, int64_t max_rows) {
  check_words(op, "handles", handles);
  check_words(op, "ids", ids);
  check_length(op, "ids", ids, handles.numel());
  const auto* handle = static_cast<const int64_t*>(handles.data_ptr());
  for (int64_t i = 0; i < handles.numel(); ++i) {
    DYNEMB_CHECK(handle[i] >= 0 && handle_row(handle[i]) < max_rows, "dynemb::", op, ": handles[",
                 i, "] is ", handle[i], ", expected one of a row from 0 to ", max_rows - 1);
  }
}

}  // namespace dynemb
