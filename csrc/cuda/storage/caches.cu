// bind_tiers, end_epoch_: the caches of a group from its construction on, and at the end of steps.
#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "arguments/rows.h"
#include "core/runtime/error_class.h"
#include "core/storage/cache.h"
#include "cuda/runtime/device.cuh"
#include "cuda/storage/caches.h"

namespace dynemb::cuda {
namespace {

constexpr int64_t kLeastSlots = 64;  // of a cache for a fraction of the rows

std::mutex registry_mutex;
std::map<const void*, std::shared_ptr<const CachedGroup>>& registry() {
  static auto* groups = new std::map<const void*, std::shared_ptr<const CachedGroup>>();
  return *groups;
}

int64_t copied_unit(const char* data, int64_t row_bytes) {
  int64_t unit = 16;
  while (row_bytes % unit != 0 || reinterpret_cast<uintptr_t>(data) % unit != 0) unit /= 2;
  return unit;
}

RowMemory reserved_rows(const char* op, const char* name, const Tensor& tensor, int64_t row_bytes) {
  const auto reservation = find_reservation(tensor.data_ptr());
  DYNEMB_CHECK(reservation != nullptr, "dynemb::", op, ": ", name,
               " was not made by reserve_cuda: reserve all tensors of a cache");
  return {reservation, static_cast<char*>(tensor.data_ptr()) - reservation->base(), row_bytes};
}

// The number of slots that a slab should have.
int64_t wanted_slots(const CachedGroup& group, size_t slab, int64_t rows) {
  const int64_t most = group.slabs[slab].most_slots;
  if (group.fraction == 0) return group.limits[slab];
  const auto share = static_cast<int64_t>(group.fraction * static_cast<double>(rows));
  return std::min(most, std::max(share, kLeastSlots));
}

// One thread. `limits`: by slab; 0: no cache.
__global__ void write_limits(int64_t* tier_clock, const int64_t* limits, int64_t slabs) {
  if (thread_number() != 0) return;
  ++tier_clock[kTierEpoch];
  tier_clock[kTierTraining] = 0;
  for (int64_t s = 0; s < slabs; ++s) {
    int64_t* clock = tier_clock + (s + 1) * kTierColumns;
    if (limits[s] == 0) continue;
    clock[kTierLimit] = limits[s];
    clock[kTierMostUsed] = clock[kTierUsed] - clock[kTierFreeCount];
  }
}

void begin_epoch(const Call& call, int64_t* tier_clock, const std::vector<int64_t>& limits) {
  Scratch scratch;
  const auto words = scratch.add<int64_t>(static_cast<int64_t>(limits.size()));
  scratch.allocate(call);
  upload_words(call, limits, scratch.get(words));
  call.launch(write_limits, 1, 1, tier_clock, scratch.get(words),
              static_cast<int64_t>(limits.size()));
}

CacheView cache_view(const Call& call, const CacheTensors& tiers, size_t s,
                     const std::vector<Tensor>& weights, const std::vector<Tensor>& generations,
                     const std::vector<Tensor>& state) {
  const char* op = call.op;
  const Tensor& places = tiers.places[s];
  const Tensor& slots = tiers.slots[s];
  check_tensor(call, "places", places, ScalarType::Int);
  check_tensor(call, "slots", slots, ScalarType::Long);
  check_tensor(call, "free_slots", tiers.free_slots[s], ScalarType::Int);
  check_size(op, "slots", slots, 1, kSlotColumns);
  check_length(op, "places", places, places.numel());
  check_length(op, "free_slots", tiers.free_slots[s], slots.size(0));
  CacheView view{};
  if (slots.size(0) == 0) return view;
  view.has_homes = weights[s].size(0) != slots.size(0);
  DYNEMB_CHECK(!view.has_homes || weights[s].size(0) == slots.size(0) + places.numel(),
               "dynemb::", op, ": weights[", s, "] has ", weights[s].size(0), " rows, expected ",
               slots.size(0), " slots, and ", places.numel(), " homes or none");
  DYNEMB_CHECK(weights[s].size(0) < INT32_MAX, "dynemb::", op, ": weights[", s, "] has ",
               weights[s].size(0), " rows, expected fewer than ", INT32_MAX);
  check_length(op, "generations", generations[s], weights[s].size(0));
  auto* head = static_cast<int64_t*>(tiers.tier_clock.data_ptr());
  view.places = static_cast<int32_t*>(places.data_ptr());
  view.max_rows = places.numel();
  view.slots = static_cast<int64_t*>(slots.data_ptr());
  view.free_slots = static_cast<int32_t*>(tiers.free_slots[s].data_ptr());
  view.most_slots = slots.size(0);
  view.head = head;
  view.clock = head + (static_cast<int64_t>(s) + 1) * kTierColumns;
  view.generations = static_cast<int32_t*>(generations[s].data_ptr());
  const auto add = [&view](const Tensor& tensor) {
    auto* data = static_cast<char*>(tensor.data_ptr());
    const int64_t bytes =
        (tensor.dim() == 2 ? tensor.size(1) : 1) * static_cast<int64_t>(tensor.element_size());
    view.moved[view.moved_count++] = {data, bytes, copied_unit(data, bytes)};
  };
  add(weights[s]);
  for (size_t k = s; k < state.size(); k += weights.size()) {
    check_size(op, "state", state[k], 0, weights[s].size(0));
    DYNEMB_CHECK(view.moved_count < kMostMoved, "dynemb::", op, ": state has ",
                 state.size() / weights.size(), " tensors for slab ", s, ", expected at most ",
                 kMostMoved - 1);
    add(state[k]);
  }
  return view;
}

// Gives the slabs with slots a cache. `fraction`: of the rows of a slab that get a slot, 0: the
// cache has as many as `limits` says, or all of them at once. `host_bytes`: of homes, at most; -1:
// no bound.
void bind_tiers(Tensor buckets, std::vector<Tensor> places, std::vector<Tensor> slots,
                std::vector<Tensor> free_slots, Tensor tier_clock, std::vector<Tensor> weights,
                std::vector<Tensor> generations, std::vector<Tensor> state, double fraction,
                std::vector<int64_t> limits, int64_t host_bytes) {
  const Call call("bind_tiers", "buckets", buckets);
  const size_t slabs = weights.size();
  DYNEMB_CHECK(slabs > 0 && places.size() == slabs && slots.size() == slabs &&
                   free_slots.size() == slabs && generations.size() == slabs &&
                   state.size() % slabs == 0,
               "dynemb::bind_tiers: got ", places.size(), " places, ", slots.size(), " slots, ",
               free_slots.size(), " free_slots, ", generations.size(), " generations and ",
               state.size(), " state for ", slabs, " slabs, expected one of each per slab");
  DYNEMB_CHECK(fraction >= 0 && fraction <= 1 && host_bytes >= RowBudget::kNoLimit,
               "dynemb::bind_tiers: fraction is ", fraction, " and host_bytes is ", host_bytes,
               ", expected 0 to 1, and at least 0 or -1: no bound");
  DYNEMB_CHECK(limits.empty() || limits.size() == slabs, "dynemb::bind_tiers: limits has ",
               limits.size(), " numbers, expected none, or one for each of ", slabs, " slabs");
  check_tensor(call, "tier_clock", tier_clock, ScalarType::Long);
  check_size(call.op, "tier_clock", tier_clock, 0, static_cast<int64_t>(slabs) + 1);
  check_size(call.op, "tier_clock", tier_clock, 1, kTierColumns);
  const auto memory = group_memory(call, buckets);
  DYNEMB_CHECK(memory != nullptr,
               "dynemb::bind_tiers: buckets was not made by reserve_cuda: reserve all tensors of a "
               "group with a cache");
  const CacheTensors tiers{places, slots, free_slots, tier_clock};
  auto group = std::make_shared<CachedGroup>(
      CachedGroup{memory, {}, fraction, {}, static_cast<int64_t*>(tier_clock.data_ptr()), false});
  std::vector<CacheMemory> caches;
  for (size_t s = 0; s < slabs; ++s) {
    const CacheView view = cache_view(call, tiers, s, weights, generations, state);
    group->slabs.push_back(view);
    group->limits.push_back(limits.empty() ? view.most_slots : limits[s]);
    DYNEMB_CHECK(group->limits[s] >= 0 && group->limits[s] <= view.most_slots,
                 "dynemb::bind_tiers: limits[", s, "] is ", group->limits[s], ", expected 0 to ",
                 view.most_slots, ", the slots");
    if (view.most_slots == 0) continue;
    DYNEMB_CHECK(caches.empty() || view.has_homes == group->has_homes,
                 "dynemb::bind_tiers: weights[", s, "] has ", weights[s].size(0),
                 " rows, but only some slabs have homes");
    group->has_homes = view.has_homes;
    caches.push_back({s,
                      view.most_slots,
                      view.max_rows,
                      view.has_homes,
                      reserved_rows(call.op, "places", places[s], 4),
                      {reserved_rows(call.op, "slots", slots[s], kSlotColumns * 8),
                       reserved_rows(call.op, "free_slots", free_slots[s], 4)}});
  }
  DYNEMB_CHECK(!caches.empty(),
               "dynemb::bind_tiers: slots has no rows in any slab, expected some in one");
  memory->cache_rows(call, caches, std::make_shared<RowBudget>(0, host_bytes));
  std::vector<int64_t> first(slabs, 0);
  for (const CacheMemory& cache : caches) {
    first[cache.slab] = wanted_slots(*group, cache.slab, 0);
    memory->map_first_slots(call, cache.slab, first[cache.slab]);
  }
  begin_epoch(call, static_cast<int64_t*>(tier_clock.data_ptr()), first);
  const std::lock_guard<std::mutex> lock(registry_mutex);
  for (auto at = registry().begin(); at != registry().end();) {
    at = at->second->memory.expired() ? registry().erase(at) : std::next(at);
  }
  registry()[tier_clock.data_ptr()] = std::move(group);
}

std::shared_ptr<const CachedGroup> find_group(const Call& call, const Tensor& tier_clock) {
  const std::lock_guard<std::mutex> lock(registry_mutex);
  const auto entry = registry().find(tier_clock.data_ptr());
  const bool known = entry != registry().end() && !entry->second->memory.expired();
  DYNEMB_CHECK(known, "dynemb::", call.op,
               ": tier_clock belongs to no group with a cache: give the tensors of a group, not "
               "copies, after bind_tiers");
  return entry->second;
}

// Gives back memory of a slab's slots from `slots` on, which have no rows. Waits for the device.
void release_slots(Tensor tier_clock, int64_t slab, int64_t slots) {
  const Call call("release_slots", "tier_clock", tier_clock);
  const auto group = find_group(call, tier_clock);
  const auto slabs = static_cast<int64_t>(group->slabs.size());
  DYNEMB_CHECK(slab >= 0 && slab < slabs && group->slabs[static_cast<size_t>(slab)].most_slots > 0,
               "dynemb::release_slots: slab is ", slab, " of ", slabs,
               ", expected the number of one with a cache");
  DYNEMB_CHECK(slots >= 0, "dynemb::release_slots: slots is ", slots, ", expected 0 at least");
  call.synchronize();
  group->memory.lock()->release_slots(call, static_cast<size_t>(slab), slots);
}

// Ends a training step. A cache for a fraction of the rows grows with them, where HBM has room.
void end_epoch_(Tensor tier_clock) {
  const Call call("end_epoch_", "tier_clock", tier_clock);
  const auto group = find_group(call, tier_clock);
  const auto memory = group->memory.lock();
  const InOrder in_order(call, memory->order());
  memory->order()->note_steps(call);
  std::vector<int64_t> limits(group->slabs.size(), 0);
  for (size_t s = 0; s < limits.size(); ++s) {
    if (group->slabs[s].most_slots == 0) continue;
    limits[s] = memory->map_slots(call, s, wanted_slots(*group, s, memory->known_rows(s)));
  }
  begin_epoch(call, static_cast<int64_t*>(tier_clock.data_ptr()), limits);
}

}  // namespace

std::shared_ptr<const CachedGroup> cached_group(const Call& call, const CacheTensors& tiers) {
  auto group = find_group(call, tiers.tier_clock);
  const size_t slabs = group->slabs.size();
  bool same = tiers.places.size() == slabs && tiers.slots.size() == slabs &&
              tiers.free_slots.size() == slabs;
  for (size_t s = 0; same && s < slabs; ++s) {
    const CacheView& view = group->slabs[s];
    same = view.most_slots == 0 ||
           (tiers.places[s].data_ptr() == view.places && tiers.slots[s].data_ptr() == view.slots &&
            tiers.free_slots[s].data_ptr() == view.free_slots);
  }
  DYNEMB_CHECK(same, "dynemb::", call.op,
               ": places, slots and free_slots are not those of the group of tier_clock: give the "
               "tensors of one group");
  return group;
}

}  // namespace dynemb::cuda

DYNEMB_IMPLEMENT_OPS(m) {
  m.impl("bind_tiers", TORCH_BOX(&dynemb::cuda::bind_tiers));
  m.impl("end_epoch_", TORCH_BOX(&dynemb::cuda::end_epoch_));
  m.impl("release_slots", TORCH_BOX(&dynemb::cuda::release_slots));
}
