// gather_records and scatter_records_: rows of a cache in the format of files
// (core/storage/record.h). In memory, the header has the generation of the row in its slot in place
// of the checksum; table, handle and id are left to the caller.
#include <torch/csrc/stable/library.h>

#include <cstring>
#include <utility>
#include <vector>

#include "arguments/rows.h"
#include "arguments/tiers.h"
#include "core/storage/record.h"
#include "cpu/runtime/parallel.h"
#include "cpu/runtime/results.h"

namespace dynemb::cpu {
namespace {

struct Part {
  char* data;
  int64_t bytes;
};

struct SlabParts {
  std::vector<Part> parts;
  int32_t* generations;
  int64_t slots;
  int64_t record;
};

SlabParts slab_parts(const char* op, const std::vector<Tensor>& weights,
                     const std::vector<Tensor>& generations, const std::vector<Tensor>& state,
                     int64_t slab) {
  const CallContext call(op);
  const auto slabs = static_cast<int64_t>(weights.size());
  DYNEMB_CHECK(slab >= 0 && slab < slabs && generations.size() == weights.size() &&
                   static_cast<int64_t>(state.size()) % slabs == 0,
               "dynemb::", op, ": slab is ", slab, " of ", slabs, " weights, ", generations.size(),
               " generations and ", state.size(), " state tensors");
  for (const auto& [name, list] :
       {std::pair{"weights", &weights}, {"generations", &generations}, {"state", &state}}) {
    for (const Tensor& tensor : *list) check_tier_memory(op, name, tensor);
  }
  for (size_t s = 0; s < weights.size(); ++s) {
    storage_of(call, "weights", weights[s]);
    DYNEMB_CHECK(weights[s].dim() == 2 && weights[s].size(1) > 0, "dynemb::", op, ": weights[", s,
                 "] has ", weights[s].dim(),
                 " dimensions, expected shape (rows, dim) with a dim of at least 1");
    check_tensor(call, "generations", generations[s], ScalarType::Int);
    check_length(op, "generations", generations[s], weights[s].size(0));
  }
  state_tensors(call, weights, state);  // raises for an invalid state
  SlabParts result{{}, nullptr, weights[slab].size(0), 0};
  const auto add = [&result](const Tensor& tensor) {
    const int64_t columns = tensor.dim() == 2 ? tensor.size(1) : 1;
    const auto element = static_cast<int64_t>(tensor.element_size());
    result.parts.push_back({static_cast<char*>(tensor.data_ptr()), columns * element});
  };
  result.generations = static_cast<int32_t*>(generations[slab].data_ptr());
  add(weights[slab]);
  for (size_t k = static_cast<size_t>(slab); k < state.size(); k += weights.size()) add(state[k]);
  int64_t bytes = 0;
  for (const Part& part : result.parts) bytes += part.bytes;
  result.record = record_bytes(bytes);
  return result;
}

const int64_t* checked_slots(const char* op, const Tensor& slots, int64_t most) {
  const CallContext call(op);
  check_words(call, "slots", slots);
  const auto* numbers = static_cast<const int64_t*>(slots.data_ptr());
  for (int64_t i = 0; i < slots.numel(); ++i) {
    DYNEMB_CHECK(numbers[i] >= 0 && numbers[i] < most, "dynemb::", op, ": slots[", i, "] is ",
                 numbers[i], ", expected 0 to ", most - 1);
  }
  return numbers;
}

constexpr int64_t kSlotsAtOnce = 256;

template <class F>
void for_slots(int64_t count, const F& f) {
  const int64_t units = (count + kSlotsAtOnce - 1) / kSlotsAtOnce;
  parallel_units(units, count, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * kSlotsAtOnce; i < end * kSlotsAtOnce && i < count; ++i) f(i);
  });
}

Tensor gather_records(std::vector<Tensor> weights, std::vector<Tensor> generations,
                      std::vector<Tensor> state, int64_t slab, Tensor slots) {
  const char* op = "gather_records";
  const SlabParts from = slab_parts(op, weights, generations, state, slab);
  const int64_t* numbers = checked_slots(op, slots, from.slots);
  Tensor records = empty_cpu({slots.numel(), from.record}, ScalarType::Byte);
  auto* out = static_cast<char*>(records.data_ptr());
  for_slots(slots.numel(), [&](int64_t i) {
    char* record = out + i * from.record;
    RecordHeader header{};
    header.crc = static_cast<uint32_t>(from.generations[numbers[i]]);
    std::memcpy(record, &header, sizeof(header));
    char* to = record + sizeof(header);
    for (const Part& part : from.parts) {
      std::memcpy(to, part.data + numbers[i] * part.bytes, static_cast<size_t>(part.bytes));
      to += part.bytes;
    }
    std::memset(to, 0, static_cast<size_t>(record + from.record - to));
  });
  return records;
}

void scatter_records_(std::vector<Tensor> weights, std::vector<Tensor> generations,
                      std::vector<Tensor> state, int64_t slab, Tensor slots, Tensor records) {
  const char* op = "scatter_records_";
  const SlabParts to = slab_parts(op, weights, generations, state, slab);
  const int64_t* numbers = checked_slots(op, slots, to.slots);
  check_tensor(CallContext(op), "records", records, ScalarType::Byte);
  DYNEMB_CHECK(
      records.dim() == 2 && records.size(0) == slots.numel() && records.size(1) == to.record,
      "dynemb::", op, ": records must have shape (", slots.numel(), ", ", to.record,
      "): a record of slab ", slab, " for each of slots");
  const auto* in = static_cast<const char*>(records.data_ptr());
  for_slots(slots.numel(), [&](int64_t i) {
    const char* record = in + i * to.record;
    RecordHeader header;
    std::memcpy(&header, record, sizeof(header));
    const char* from = record + sizeof(header);
    for (const Part& part : to.parts) {
      std::memcpy(part.data + numbers[i] * part.bytes, from, static_cast<size_t>(part.bytes));
      from += part.bytes;
    }
    to.generations[numbers[i]] = static_cast<int32_t>(header.crc);
  });
}

}  // namespace
}  // namespace dynemb::cpu

STABLE_TORCH_LIBRARY_IMPL(dynemb, CPU, m) {
  m.impl("gather_records", TORCH_BOX(&dynemb::cpu::gather_records));
  m.impl("scatter_records_", TORCH_BOX(&dynemb::cpu::scatter_records_));
}

// For error messages about a GPU's tensors, also in builds without CUDA kernels.
STABLE_TORCH_LIBRARY_IMPL(dynemb, CUDA, m) {
  m.impl("gather_records", TORCH_BOX(&dynemb::cpu::gather_records));
  m.impl("scatter_records_", TORCH_BOX(&dynemb::cpu::scatter_records_));
}
