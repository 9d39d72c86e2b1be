// take_slots_: slots of a cache in HBM for rows that lie in a store. The caller saves the rows that
// lose their slots, and loads the others, before rows are read.
//
// The kernels of stage.cu report the moves in pinned memory, for which the host waits once. A call
// that needs more slots of a slab than the cache has is refused by this slab as a whole. Then the
// cache grows, and the call is repeated for it.
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <tuple>

#include "cuda/storage/stage.h"

namespace dynemb::cuda {
namespace {

// Words of a slab's report.
int64_t report_words(const CacheView& cache, int64_t ids) {
  return kReportHead + kMovedWords * std::min(ids, cache.most_slots);
}

// At least so many words, which no kernel uses any more.
const PinnedWords& report_memory(const Call& call, MoveReports* reports, int64_t count) {
  if (reports->count < count) {
    reports->words = nullptr;
    reports->count = 0;
    const int64_t words = count + count / 8;
    reports->words = std::make_unique<PinnedWords>(call.op, call.device, words);
    reports->count = words;
  }
  return *reports->words;
}

Tensor host_words(const std::vector<int64_t>& size) {
  return torch::stable::empty(size, ScalarType::Long, std::nullopt,
                              torch::stable::Device(torch::headeronly::DeviceType::CPU));
}

class MoveTable {
 public:
  explicit MoveTable(int64_t rows)
      : tensor_(host_words({rows, kMoveColumns})),
        row_(static_cast<int64_t*>(tensor_.data_ptr())) {}

  void add(size_t slab, bool loads, int64_t slot, volatile const int64_t* row) {
    row_[kMoveSlab] = static_cast<int64_t>(slab);
    row_[kMoveLoads] = loads ? 1 : 0;
    row_[kMoveSlot] = slot;
    row_[kMoveHandle] = row[0];
    row_[kMoveId] = row[1];
    row_[kMoveTable] = row[2];
    row_[kMoveGeneration] = row[3];
    row_ += kMoveColumns;
  }
  const Tensor& tensor() const { return tensor_; }

 private:
  Tensor tensor_;
  int64_t* row_;
};
static_assert(kMovedId == kMovedHandle + 1 && kMovedTable == kMovedHandle + 2 &&
              kMovedGeneration == kMovedHandle + 3 && kMovedSavedId == kMovedSaved + 1 &&
              kMovedSavedTable == kMovedSaved + 2 && kMovedSavedGeneration == kMovedSaved + 3);

// Calls f(slab, words of a row with a slot) for all slabs.
template <class F>
void for_moved(const std::vector<volatile const int64_t*>& reports, const F& f) {
  for (size_t s = 0; s < reports.size(); ++s) {
    if (reports[s] == nullptr) continue;
    for (int64_t k = 0; k < reports[s][kReportGiven]; ++k) {
      f(s, reports[s] + kReportHead + k * kMovedWords);
    }
  }
}

// All saves precede all loads.
Tensor moves_of(const std::vector<volatile const int64_t*>& reports) {
  int64_t count = 0;
  for_moved(reports, [&](size_t, volatile const int64_t* words) {
    count += words[kMovedSaved] >= 0 ? 2 : 1;
  });
  MoveTable moves(count);
  for_moved(reports, [&](size_t s, volatile const int64_t* words) {
    if (words[kMovedSaved] >= 0) moves.add(s, false, words[kMovedSlot], words + kMovedSaved);
  });
  for_moved(reports, [&](size_t s, volatile const int64_t* words) {
    moves.add(s, true, words[kMovedSlot], words + kMovedHandle);
  });
  return moves.tensor();
}

// The slots that a refused call needs. `attempt`: from 0.
int64_t slots_needed(volatile const int64_t* report, int64_t attempt) {
  // the second search may find fewer victims
  const int64_t victims = attempt == 0 ? report[kReportVictims] : 0;
  return report[kReportUsed] + report[kReportWanted] - report[kReportFree] - victims;
}

// Handles, moves, and by slab the slots for which memory is short: the call has changed nothing
// there.
std::tuple<Tensor, Tensor, Tensor> take_slots_(std::vector<Tensor> places,
                                               std::vector<Tensor> slots,
                                               std::vector<Tensor> free_slots, Tensor tier_clock,
                                               Tensor meta, Tensor ids, Tensor handles,
                                               Tensor offsets, std::vector<int64_t> feature_tables,
                                               bool trains, int64_t ahead) {
  const Call call("take_slots_", "tier_clock", tier_clock);
  const auto group = cached_group(call, {places, slots, free_slots, tier_clock});
  const InOrder in_order(call, group->memory.lock()->order());
  DYNEMB_CHECK(!group->has_homes,
               "dynemb::take_slots_: the rows have homes in host memory: call stage_");
  DYNEMB_CHECK(!call.capturing(),
               "dynemb::take_slots_: a captured step cannot wait for rows of a store: give the "
               "tables storage=torch_dynemb.HostStore(cache=...), or run the step without a graph");
  DYNEMB_CHECK(ahead >= 0 && ahead <= INT32_MAX, "dynemb::take_slots_: ahead is ", ahead,
               ", expected 0 for a lookup, or the steps until it");
  const int64_t count = ids.numel();
  const size_t slabs = group->slabs.size();
  int64_t words = 0;
  for (const CacheView& cache : group->slabs) words += report_words(cache, count);
  const PinnedWords& memory = report_memory(call, group->reports.get(), words);
  std::vector<SlabReport> reports(slabs);
  std::vector<volatile const int64_t*> read(slabs, nullptr);
  int64_t begin = 0;
  for (size_t s = 0; s < slabs; ++s) {
    if (group->slabs[s].most_slots == 0) continue;
    reports[s].words = memory.device() + begin;
    read[s] = memory.host() + begin;
    for (int64_t w = 0; w < kReportHead; ++w) (memory.host() + begin)[w] = 0;
    begin += report_words(group->slabs[s], count);
  }
  const StagedIds given{meta, ids, handles, offsets, feature_tables};
  Tensor out = call.empty({count}, ScalarType::Long);
  Tensor missing = host_words({static_cast<int64_t>(slabs)});
  auto* short_of = static_cast<int64_t*>(missing.data_ptr());
  std::fill(short_of, short_of + slabs, 0);
  const auto owner = group->memory.lock();
  for (int64_t attempt = 0;; ++attempt) {
    stage_rows(call, *group, given, trains, ahead, reports, out);
    call.synchronize();
    bool refused = false;
    for (size_t s = 0; s < slabs; ++s) {
      if (reports[s].words == nullptr) continue;
      const bool has_all = ahead > 0 || read[s][kReportGiven] == read[s][kReportWanted];
      const int64_t needed = has_all ? 0 : slots_needed(read[s], attempt);
      const bool grows = needed > 0 && needed <= group->slabs[s].most_slots &&
                         owner->map_slots(call, s, needed) == needed;
      if (grows) {
        reports[s].slots = needed;
        reports[s].repeated = true;
        refused = true;
      } else {
        reports[s].words = nullptr;
        short_of[s] = needed;
      }
    }
    if (!refused) return {out, moves_of(read), missing};
  }
}

}  // namespace
}  // namespace dynemb::cuda

DYNEMB_IMPLEMENT_OPS(m) { m.impl("take_slots_", TORCH_BOX(&dynemb::cuda::take_slots_)); }
