#include "arguments/tiers.h"

#include <tuple>

#include "core/columns.h"
#include "core/storage/cache.h"

namespace dynemb {

void check_tier_memory(const char* op, const char* name, const Tensor& tensor) {
  check_defined(op, name, tensor);
  DYNEMB_CHECK(tensor.is_cpu(), "dynemb::", op, ": ", name, " is on ", device_name(tensor),
               ", but ", op,
               " moves rows in host memory: tables with storage are on the CPU, and so are "
               "their tensors");
}

TierTensors tier_tensors(const CallContext& call, const std::vector<Tensor>& places,
                         const std::vector<Tensor>& slots, const std::vector<Tensor>& free_slots,
                         const Tensor& tier_clock) {
  const char* op = call.op;
  const bool same = places.size() == slots.size() && places.size() == free_slots.size();
  DYNEMB_CHECK(!places.empty() && same, "dynemb::", op, ": got ", places.size(), " places, ",
               slots.size(), " slots and ", free_slots.size(),
               " free_slots, expected one of each per slab");
  check_tier_memory(op, "tier_clock", tier_clock);
  check_tensor(call, "tier_clock", tier_clock, ScalarType::Long);
  check_size(op, "tier_clock", tier_clock, 0, static_cast<int64_t>(places.size()) + 1);
  check_size(op, "tier_clock", tier_clock, 1, kTierColumns);
  TierTensors tiers{{}, static_cast<int64_t*>(tier_clock.data_ptr())};
  for (size_t s = 0; s < places.size(); ++s) {
    check_tier_memory(op, "places", places[s]);
    check_tier_memory(op, "slots", slots[s]);
    check_tier_memory(op, "free_slots", free_slots[s]);
    check_tensor(call, "places", places[s], ScalarType::Int);
    check_tensor(call, "slots", slots[s], ScalarType::Long);
    check_tensor(call, "free_slots", free_slots[s], ScalarType::Int);
    check_size(op, "slots", slots[s], 1, kSlotColumns);
    DYNEMB_CHECK(places[s].dim() == 1, "dynemb::", op, ": places[", s, "] has ", places[s].dim(),
                 " dimensions, expected 1");
    const int64_t rows = places[s].numel();
    check_size(op, "slots", slots[s], 0, rows);
    check_length(op, "free_slots", free_slots[s], rows);
    DYNEMB_CHECK(rows <= INT32_MAX, "dynemb::", op, ": slots[", s, "] has ", rows,
                 " slots, expected at most ", INT32_MAX);
    int64_t* clock = tiers.head + (static_cast<int64_t>(s) + 1) * kTierColumns;
    const int64_t used = clock[kTierUsed];
    DYNEMB_CHECK(used >= 0 && used <= slots[s].size(0), "dynemb::", op, ": tier_clock says ", used,
                 " slots of slab ", s, " are in use, but there are ", slots[s].size(0));
    for (const auto& [column, name, most] : {std::tuple{kTierLimit, "LIMIT", int64_t{INT32_MAX}},
                                             {kTierCursor, "CURSOR", used},
                                             {kTierFreeCount, "FREE_COUNT", used},
                                             {kTierSlotBytes, "SLOT_BYTES", int64_t{INT32_MAX}}}) {
      DYNEMB_CHECK(clock[column] >= 0 && clock[column] <= most, "dynemb::", op, ": tier_clock[",
                   s + 1, ", ", name, "] is ", clock[column], ", expected 0 to ", most);
    }
    tiers.slabs.push_back({rows > 0 ? static_cast<int32_t*>(places[s].data_ptr()) : nullptr, rows,
                           static_cast<int64_t*>(slots[s].data_ptr()),
                           static_cast<int32_t*>(free_slots[s].data_ptr()), clock});
  }
  return tiers;
}

std::vector<int64_t> slabs_of_tables(const CallContext& call, const Tensor& meta, size_t slabs) {
  check_tensor(call, "meta", meta, ScalarType::Long);
  check_size(call.op, "meta", meta, 1, kMetaColumns);
  DYNEMB_CHECK(meta.size(0) <= kMostTables, "dynemb::", call.op, ": meta has ", meta.size(0),
               " tables, expected at most ", kMostTables, " where some have storage");
  const auto* rows = static_cast<const int64_t*>(meta.data_ptr());
  std::vector<int64_t> result(static_cast<size_t>(meta.size(0)));
  for (size_t t = 0; t < result.size(); ++t) {
    result[t] = rows[t * kMetaColumns + kMetaSlab];
    DYNEMB_CHECK(result[t] >= 0 && result[t] < static_cast<int64_t>(slabs), "dynemb::", call.op,
                 ": meta says that table ", t, " is of slab ", result[t], ", expected 0 to ",
                 slabs - 1);
  }
  return result;
}

const CacheSlab& cached_slab(const char* op, const TierTensors& tiers, int64_t slab) {
  DYNEMB_CHECK(slab >= 0 && slab < static_cast<int64_t>(tiers.slabs.size()), "dynemb::", op,
               ": slab is ", slab, ", expected 0 to ", tiers.slabs.size() - 1);
  const CacheSlab& cache = tiers.slabs[static_cast<size_t>(slab)];
  DYNEMB_CHECK(cache.places != nullptr, "dynemb::", op, ": slab ", slab,
               " has no cache: its rows are in memory");
  return cache;
}

}  // namespace dynemb
