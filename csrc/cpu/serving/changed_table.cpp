#include "cpu/serving/changed_table.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "cpu/serving/live_reader.h"

namespace dynemb::cpu {
namespace {

constexpr int64_t kLine = 64;  // bytes: a bucket, and the column that readers poll, have one each
constexpr int64_t kCounterWords = int64_t{kLiveTableColumns} + int64_t{kLiveSlabColumns} + 4;

// Of removed ids, which have no values.
constexpr Storage kNoFormat = Storage::kFloat16;
constexpr int64_t kNoDim = 1;

struct ChangeSink {
  ChangedId* state;
  ChangedId from, found;  // states before and after
  char* to = nullptr;     // nullptr: no rows
  int64_t stride = 0, row_bytes = 0;

  DYNEMB_INLINE void take(int64_t first, const char* const* row, int64_t count, bool) {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t at = first + i;
      if (row[i] == nullptr || state[at] != from) continue;
      state[at] = found;
      if (to != nullptr) {
        std::memcpy(to + at * stride, row[i], static_cast<size_t>(row_bytes));
      }
    }
  }
};

bool read_into(const LiveTable& table, const int64_t* ids, int64_t count, ChangeSink sink) {
  std::vector<int64_t> slots(static_cast<size_t>(kLiveSlots * live_slot_bytes(table) / 8));
  return read_live<true>(table, ids, count, reinterpret_cast<char*>(slots.data()), sink) < 0;
}

int64_t count(const std::vector<int64_t>& ids) { return static_cast<int64_t>(ids.size()); }

void sort_distinct(std::vector<int64_t>& ids) {
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
}

}  // namespace

int64_t OwnedLiveTable::bytes_of(int64_t ids, Storage format, int64_t dim) {
  return 8 * (kCounterWords + 2 * buckets_for(ids) * kBucketWords +
              (ids + 1) * live_row_words(format, dim)) +
         kLine;
}

OwnedLiveTable::OwnedLiveTable(int64_t ids, Storage format, int64_t dim, uint64_t salt)
    : memory_(std::calloc(1, static_cast<size_t>(bytes_of(ids, format, dim))), &std::free),
      writer_{} {
  if (memory_ == nullptr) throw std::bad_alloc();
  auto* word = reinterpret_cast<int64_t*>((reinterpret_cast<uintptr_t>(memory_.get()) + kLine - 1) /
                                          kLine * kLine);
  static_assert(kCounterWords * 8 % kLine == 0, "buckets begin at a line");
  const int64_t buckets = buckets_for(ids);
  writer_.counters = word;
  writer_.slab = word + kLiveTableColumns;
  writer_.counters[kLiveTableCapacity] = ids;
  LiveTable& table = writer_.table;
  table.lines = word + kCounterWords;
  table.range_buckets = buckets;
  table.active = writer_.counters + kLiveTableActive;
  table.salt = salt;
  table.rows = table.lines + 2 * buckets * kBucketWords;
  table.row_count = ids + 1;  // an update writes a row before it frees the old one
  table.row_words = live_row_words(format, dim);
  table.dim = dim;
  table.format = format;
}

bool OwnedLiveTable::has(int64_t id) const {
  const LiveTable& of = table();
  const uint64_t hash = first_hash(id, of.salt);
  return find_live(of, of.range(load_word(of.active)), id, hash, 0).stored != 0;
}

std::vector<std::pair<int64_t, const char*>> OwnedLiveTable::list() const {
  const LiveTable& of = table();
  const int64_t* range = of.range(load_word(of.active));
  std::vector<std::pair<int64_t, const char*>> result;
  result.reserve(static_cast<size_t>(size()));
  for (int64_t b = 0; b < of.range_buckets; ++b) {
    const int64_t* line = line_of(range, b);
    for (int64_t j = 0; j < kBucketWidth; ++j) {
      const int64_t stored = line[kBucketWidth + j];
      if (stored <= 0) continue;
      const int64_t* row = of.row(handle_row(decode_handle(stored)));
      result.emplace_back(line[j], reinterpret_cast<const char*>(row));
    }
  }
  return result;
}

ChangedTable::ChangedTable(int64_t ids, Storage format, int64_t dim, uint64_t salt)
    : headroom(ids), changed(ids, format, dim, salt), removed(ids, kNoFormat, kNoDim, salt) {}

int64_t ChangedTable::bytes_of(int64_t headroom, Storage format, int64_t dim) {
  return OwnedLiveTable::bytes_of(headroom, format, dim) +
         OwnedLiveTable::bytes_of(headroom, kNoFormat, kNoDim);
}

bool ChangedTable::read(const int64_t* ids, int64_t count, char* to, int64_t stride,
                        ChangedId* state) const {
  const auto look_among_removed = [&](ChangedId from) {
    if (!any_removed.load(std::memory_order_acquire)) return true;
    return read_into(removed.table(), ids, count, {state, from, ChangedId::kRemoved});
  };
  std::fill_n(state, count, ChangedId::kAskFile);
  if (!look_among_removed(ChangedId::kAskFile)) return false;
  if (!any_changed.load(std::memory_order_acquire)) return true;
  const LiveTable& rows = changed.table();
  const int64_t bytes = live_value_bytes(rows.format, rows.dim);
  if (!read_into(rows, ids, count,
                 {state, ChangedId::kAskFile, ChangedId::kRead, to, stride, bytes})) {
    return false;
  }
  // The row of an id that was removed meanwhile may be one that is about to bring it back: it is
  // not given out before all readers find it.
  if (std::find(state, state + count, ChangedId::kRead) == state + count) return true;
  return look_among_removed(ChangedId::kRead);
}

ChangePlan ChangedTable::plan(
    const LiveUpdate& update,
    const std::function<std::vector<bool>(const std::vector<int64_t>&)>& in_file) const {
  std::vector<int64_t> given(update.ids, update.ids + update.count);
  std::vector<int64_t> gone(update.erased, update.erased + update.erased_count);
  sort_distinct(given), sort_distinct(gone);
  gone.erase(std::remove_if(
                 gone.begin(), gone.end(),
                 [&](int64_t id) { return std::binary_search(given.begin(), given.end(), id); }),
             gone.end());
  ChangePlan plan{};
  const std::vector<bool> gone_in_file = in_file(gone);
  for (size_t i = 0; i < gone.size(); ++i) {
    if (gone_in_file[i]) {
      if (!removed.has(gone[i])) plan.hidden.push_back(gone[i]);
    } else if (changed.has(gone[i])) {
      plan.dropped.push_back(gone[i]);
    }
  }
  LiveOutcome& outcome = plan.outcome;
  int64_t fresh = 0;  // ids that need a row here
  const std::vector<bool> given_in_file = in_file(given);
  for (size_t i = 0; i < given.size(); ++i) {
    const bool is_here = changed.has(given[i]);
    const bool is_removed = given_in_file[i] && removed.has(given[i]);
    fresh += !is_here;
    outcome.inserted += is_removed || (!given_in_file[i] && !is_here);
    if (is_removed) plan.shown.push_back(given[i]);
  }
  outcome.updated = update.count - outcome.inserted;
  outcome.erased = count(plan.hidden) + count(plan.dropped);
  outcome.wanted =
      std::max(changed.size() - count(plan.dropped) + fresh, removed.size() + count(plan.hidden));
  outcome.free = headroom;
  plan.wanted_alone = std::max(count(given), outcome.erased);
  return plan;
}

void ChangedTable::apply(const LiveUpdate& update, const ChangePlan& plan) {
  if (!plan.hidden.empty()) {
    any_removed.store(true, std::memory_order_release);
    const std::vector<int64_t> no_rows(plan.hidden.size() *
                                       static_cast<size_t>(removed.table().row_words));
    apply_live(removed.writer(),
               {plan.hidden.data(), count(plan.hidden), no_rows.data(), nullptr, 0});
  }
  if (update.count > 0) any_changed.store(true, std::memory_order_release);
  apply_live(changed.writer(),
             {update.ids, update.count, update.packed, plan.dropped.data(), count(plan.dropped)});
  if (!plan.shown.empty()) {
    apply_live(removed.writer(), {nullptr, 0, nullptr, plan.shown.data(), count(plan.shown)});
  }
}

std::vector<std::pair<int64_t, const char*>> ChangedTable::changed_rows() const {
  auto listed = changed.list();
  listed.erase(std::remove_if(listed.begin(), listed.end(),
                              [&](const auto& entry) { return removed.has(entry.first); }),
               listed.end());
  return listed;
}

std::vector<int64_t> ChangedTable::removed_ids() const {
  std::vector<int64_t> ids;
  for (const auto& [id, row] : removed.list()) ids.push_back(id);
  return ids;
}

}  // namespace dynemb::cpu
