#include "cpu/serving/file_changes.h"

#include <algorithm>
#include <cstring>

#include "core/runtime/check.h"
#include "core/runtime/error_class.h"
#include "cpu/memory/reserve.h"
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
  ChangedId found;
  char* to;  // nullptr: no rows
  int64_t stride, row_bytes;

  DYNEMB_INLINE void take(int64_t first, const char* const* row, int64_t count, bool) {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t at = first + i;
      if (row[i] == nullptr || state[at] != ChangedId::kAskFile) continue;
      state[at] = found;
      if (to != nullptr) {
        std::memcpy(to + at * stride, row[i], static_cast<size_t>(row_bytes));
      }
    }
  }
};

void read_into(const LiveTable& table, const int64_t* ids, int64_t count, ChangeSink sink) {
  std::vector<int64_t> slots(static_cast<size_t>(kLiveSlots * live_slot_bytes(table) / 8));
  const int64_t damaged =
      read_live<true>(table, ids, count, reinterpret_cast<char*>(slots.data()), sink);
  DYNEMB_CHECK(damaged < 0, "dynemb: the changes in memory of a file's rows are damaged: ",
               "load the package, or make the model live, again");
}

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

LiveFile::LiveFile(std::string first, const RowFile& file, const int64_t* meta,
                   const std::vector<int64_t>& headroom)
    : path(std::move(first)) {
  for (size_t t = 0; t < headroom.size(); ++t, meta += kMetaColumns) {
    tables.push_back(std::unique_ptr<Table>(new Table{bucket_salt(meta[kMetaSeed]),
                                                      meta[kMetaHasPadding] != 0,
                                                      meta[kMetaPaddingId],
                                                      headroom[t],
                                                      {file.tables()[t].size},
                                                      {0}}));
  }
}

std::vector<int64_t> LiveFile::headroom() const {
  std::vector<int64_t> result;
  for (const auto& table : tables) result.push_back(table->headroom);
  return result;
}

FileChanges::FileChanges(std::shared_ptr<LiveFile> live, const RowFile& file)
    : live_(std::move(live)) {
  int64_t bytes = 0, ids = 0;
  for (size_t t = 0; t < live_->tables.size(); ++t) {
    const int64_t room = live_->tables[t]->headroom;
    bytes += OwnedLiveTable::bytes_of(room, file.tables()[t].storage, file.tables()[t].dim) +
             OwnedLiveTable::bytes_of(room, kNoFormat, kNoDim);
    ids += room;
  }
  DYNEMB_CHECK(has_available_memory(bytes), "dynemb: changes of ", ids, " ids take ", bytes,
               " bytes of memory, which are not free: give the tables less headroom",
               kHostMemoryError);
  for (size_t t = 0; t < live_->tables.size(); ++t) {
    const LiveFile::Table& of = *live_->tables[t];
    const FileTable& rows = file.tables()[t];
    tables_.push_back(std::unique_ptr<Table>(
        new Table{OwnedLiveTable(of.headroom, rows.storage, rows.dim, of.salt),
                  OwnedLiveTable(of.headroom, kNoFormat, kNoDim, of.salt)}));
  }
}

void FileChanges::read(int64_t table, const int64_t* ids, int64_t count, char* to, int64_t stride,
                       ChangedId* state) const {
  const Table& of = *tables_[table];
  std::fill_n(state, count, ChangedId::kAskFile);
  if (of.any_removed.load(std::memory_order_acquire)) {
    read_into(of.removed.table(), ids, count, {state, ChangedId::kRemoved, nullptr, 0, 0});
  }
  if (of.any_changed.load(std::memory_order_acquire)) {
    const LiveTable& rows = of.changed.table();
    read_into(rows, ids, count,
              {state, ChangedId::kRead, to, stride, live_value_bytes(rows.format, rows.dim)});
  }
}

LiveOutcome FileChanges::apply(RowFile& file, int64_t table, const LiveUpdate& update) {
  Table& of = *tables_[table];
  LiveFile::Table& live = *live_->tables[table];
  const auto in_file = [&](const std::vector<int64_t>& ids) {
    std::vector<int64_t> rows(ids.size());
    const std::string wrong =
        file.find(table, live.salt, ids.data(), static_cast<int64_t>(ids.size()), rows.data());
    DYNEMB_CHECK(wrong.empty(), "dynemb::file_apply: ", wrong);
    return rows;
  };
  std::vector<int64_t> given(update.ids, update.ids + update.count);
  std::vector<int64_t> gone(update.erased, update.erased + update.erased_count);
  sort_distinct(given), sort_distinct(gone);
  gone.erase(std::remove_if(
                 gone.begin(), gone.end(),
                 [&](int64_t id) { return std::binary_search(given.begin(), given.end(), id); }),
             gone.end());
  std::vector<int64_t> hidden, dropped;  // ids of the file, and ids that are here alone
  const std::vector<int64_t> gone_rows = in_file(gone);
  for (size_t i = 0; i < gone.size(); ++i) {
    if (gone_rows[i] >= 0) {
      if (!of.removed.has(gone[i])) hidden.push_back(gone[i]);
    } else if (of.changed.has(gone[i])) {
      dropped.push_back(gone[i]);
    }
  }
  LiveOutcome outcome{};
  std::vector<int64_t> shown;  // removed ids that come back
  int64_t fresh = 0;           // ids that need a row here
  const std::vector<int64_t> given_rows = in_file(given);
  for (size_t i = 0; i < given.size(); ++i) {
    const bool is_here = of.changed.has(given[i]);
    const bool is_removed = given_rows[i] >= 0 && of.removed.has(given[i]);
    fresh += !is_here;
    outcome.inserted += is_removed || (given_rows[i] < 0 && !is_here);
    if (is_removed) shown.push_back(given[i]);
  }
  const auto count = [](const std::vector<int64_t>& ids) {
    return static_cast<int64_t>(ids.size());
  };
  outcome.updated = update.count - outcome.inserted;
  outcome.erased = count(hidden) + count(dropped);
  outcome.wanted = std::max(of.changed.size() + fresh, of.removed.size() + count(hidden));
  outcome.free = live.headroom;
  if (outcome.wanted > outcome.free) return outcome;
  if (!hidden.empty()) {
    of.any_removed.store(true, std::memory_order_release);
    const std::vector<int64_t> no_rows(hidden.size() *
                                       static_cast<size_t>(of.removed.table().row_words));
    apply_live(of.removed.writer(), {hidden.data(), count(hidden), no_rows.data(), nullptr, 0});
  }
  if (update.count > 0) of.any_changed.store(true, std::memory_order_release);
  apply_live(of.changed.writer(),
             {update.ids, update.count, update.packed, dropped.data(), count(dropped)});
  if (!shown.empty()) {
    apply_live(of.removed.writer(), {nullptr, 0, nullptr, shown.data(), count(shown)});
  }
  live.ids += outcome.inserted - outcome.erased;
  ++live.updates;
  return outcome;
}

bool FileChanges::has_any() const {
  return std::any_of(tables_.begin(), tables_.end(), [](const auto& table) {
    return table->changed.size() + table->removed.size() > 0;
  });
}

std::vector<std::pair<int64_t, const char*>> FileChanges::changed(int64_t table) const {
  const Table& of = *tables_[table];
  auto listed = of.changed.list();
  listed.erase(std::remove_if(listed.begin(), listed.end(),
                              [&](const auto& entry) { return of.removed.has(entry.first); }),
               listed.end());
  return listed;
}

std::vector<int64_t> FileChanges::removed(int64_t table) const {
  std::vector<int64_t> ids;
  for (const auto& [id, row] : tables_[table]->removed.list()) ids.push_back(id);
  return ids;
}

}  // namespace dynemb::cpu
