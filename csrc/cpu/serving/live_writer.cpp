#include "cpu/serving/live_writer.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/runtime/check.h"
#include "cpu/runtime/prefetch.h"
#include "cpu/serving/live_reader.h"

namespace dynemb::cpu {
namespace {

// Ids between a prefetch and its use.
constexpr int64_t kAhead = 16;

struct Slot {
  int64_t* line;  // nullptr: none
  int64_t slot;

  int64_t* key() const { return line + slot; }
  int64_t* stored() const { return line + kBucketWidth + slot; }
};

// Checks tables that other code may have damaged.
void check_sound(bool sound) {
  DYNEMB_CHECK(sound,
               "dynemb::serve_apply_: the table is damaged: its index, its rows and the "
               "counts of both do not go together. Make it again from the model");
}

// Only the writer changes words, so it may read them in any order.
Slot slot_of(const LiveTable& table, int64_t* range, int64_t id) {
  const ProbeSequence sequence(first_hash(id, table.salt), table.range_buckets);
  for (int64_t i = 0; i < sequence.length(); ++i) {
    int64_t* line = line_of(range, sequence.at(i));
    for (int64_t j = 0; j < kBucketWidth; ++j) {
      if (load_word(line + j) == id && load_word(line + kBucketWidth + j) > 0) return {line, j};
    }
    if (has_empty_live(line)) break;
  }
  return {nullptr, 0};
}

// The first slot without an id in the probe sequence of `id`.
Slot free_slot_of(const LiveTable& table, int64_t* range, int64_t id) {
  const ProbeSequence sequence(first_hash(id, table.salt), table.range_buckets);
  for (int64_t i = 0; i < sequence.length(); ++i) {
    int64_t* line = line_of(range, sequence.at(i));
    for (int64_t j = 0; j < kBucketWidth; ++j) {
      if (load_word(line + kBucketWidth + j) <= 0) return {line, j};
    }
  }
  check_sound(false);  // there are fewer ids than slots
  return {nullptr, 0};
}

// Fetches the line of an id a little before it is read.
void prefetch_line(const LiveTable& table, int64_t* range, int64_t id) {
  const ProbeSequence sequence(first_hash(id, table.salt), table.range_buckets);
  prefetch_line_of(line_of(range, sequence.at(0)));
}

// Fetches the row of an id a little before a new one replaces it. The next update writes there.
void prefetch_row(const LiveTable& table, int64_t* range, int64_t id) {
  const Slot slot = slot_of(table, range, id);
  if (slot.line == nullptr) return;
  const int64_t row = handle_row(decode_handle(load_word(slot.stored())));
  if (row >= table.row_count) return;  // damaged; the update says so
  prefetch_row_bytes(reinterpret_cast<const char*>(table.row(row)), 8 * table.row_words);
}

int64_t* active_range(const LiveTable& table) { return table.range(load_word(table.active)); }

void place(const Slot& slot, int64_t id, int64_t stored) {
  store_word_release(slot.key(), id);
  store_word_release(slot.stored(), stored);
}

// A row without an owner, and the generation of the next one.
int64_t take_row(const LiveWriter& writer) {
  int64_t* slab = writer.slab;
  if (slab[kLiveSlabFreeHead] == 0) {
    check_sound(slab[kLiveSlabNextRow] < writer.table.row_count);
    return make_handle(slab[kLiveSlabNextRow]++, next_live_generation(0));
  }
  const int64_t number = slab[kLiveSlabFreeHead] - 1;
  check_sound(number >= 0 && number < writer.table.row_count);
  const int64_t* row = writer.table.row(number);
  const int64_t generation = load_word(row + kLiveGenerationWord);
  const int64_t next_free = load_word(row + kLiveNextFreeWord);
  check_sound((generation & ~int64_t{kGenerationMask}) == 0 && next_free >= 0 &&
              next_free <= writer.table.row_count);
  slab[kLiveSlabFreeHead] = next_free;
  --slab[kLiveSlabFreeCount];
  return make_handle(number, next_live_generation(generation));
}

// Called after the index has dropped the row.
void free_row(const LiveWriter& writer, int64_t stored) {
  const int64_t handle = decode_handle(stored);
  check_sound(handle_row(handle) < writer.table.row_count);
  int64_t* row = writer.table.row(handle_row(handle));
  release_fence();  // a reader of a later word sees that the handle has left the index
  store_word(row + kLiveGenerationWord, handle_generation(handle));
  store_word(row + kLiveNextFreeWord, writer.slab[kLiveSlabFreeHead]);
  writer.slab[kLiveSlabFreeHead] = handle_row(handle) + 1;
  ++writer.slab[kLiveSlabFreeCount];
}

// Writes a free row; returns its stored handle.
int64_t write_row(const LiveWriter& writer, const char* packed) {
  const int64_t handle = take_row(writer);
  int64_t* row = writer.table.row(handle_row(handle));
  release_fence();  // likewise
  for (int64_t w = 0; w < writer.table.row_words; ++w) {
    int64_t word;  // of floats, perhaps
    std::memcpy(&word, packed + 8 * w, sizeof word);
    store_word(row + w, word);
  }
  return encode_handle(handle);
}

void erase(const LiveWriter& writer, const Slot& slot) {
  const int64_t stored = load_word(slot.stored());
  const bool was_full = !has_empty_live(slot.line);
  store_word_release(slot.stored(), was_full ? kLiveTombstone : 0);
  writer.counters[kLiveTableTombstones] += was_full;
  --writer.counters[kLiveTableSize];
  free_row(writer, stored);
}

void insert(const LiveWriter& writer, int64_t id, const char* packed) {
  const Slot slot = free_slot_of(writer.table, active_range(writer.table), id);
  writer.counters[kLiveTableTombstones] -= load_word(slot.stored()) == kLiveTombstone;
  ++writer.counters[kLiveTableSize];
  place(slot, id, write_row(writer, packed));
}

void replace(const LiveWriter& writer, const Slot& slot, const char* packed) {
  const int64_t old = load_word(slot.stored());
  store_word_release(slot.stored(), write_row(writer, packed));
  free_row(writer, old);
}

int64_t count_distinct(std::vector<int64_t>& ids) {
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  return static_cast<int64_t>(ids.size());
}

// Result of the update with respect to rows. `gone` receives the ids to remove, sorted: those in
// the table that have no row in the update.
LiveOutcome plan(const LiveWriter& writer, const LiveUpdate& update, std::vector<int64_t>& gone) {
  int64_t* range = active_range(writer.table);
  const auto is_there = [&](int64_t id) {
    return slot_of(writer.table, range, id).line != nullptr;
  };
  std::vector<int64_t> given;
  if (update.erased_count > 0) given.assign(update.ids, update.ids + update.count);
  std::sort(given.begin(), given.end());
  for (int64_t i = 0; i < update.erased_count; ++i) {
    const int64_t id = update.erased[i];
    if (!std::binary_search(given.begin(), given.end(), id) && is_there(id)) gone.push_back(id);
  }
  LiveOutcome outcome{};
  outcome.erased = count_distinct(gone);
  std::vector<int64_t> fresh;
  for (int64_t i = 0; i < update.count; ++i) {
    if (i + kAhead < update.count) prefetch_line(writer.table, range, update.ids[i + kAhead]);
    if (!is_there(update.ids[i])) fresh.push_back(update.ids[i]);
  }
  outcome.inserted = outcome.wanted = count_distinct(fresh);
  outcome.updated = update.count - outcome.inserted;
  // one row never has an owner: an update writes a row before it frees the old one
  const int64_t unused =
      writer.table.row_count - writer.slab[kLiveSlabNextRow] + writer.slab[kLiveSlabFreeCount] - 1;
  const int64_t* counters = writer.counters;
  outcome.free =
      outcome.erased + std::min(unused, counters[kLiveTableCapacity] - counters[kLiveTableSize]);
  return outcome;
}

}  // namespace

void rehash_live(const LiveWriter& writer) {
  const LiveTable& table = writer.table;
  const int64_t rehashes = load_word(table.active);
  int64_t* from = table.range(rehashes);
  int64_t* to = table.range(rehashes + 1);
  const int64_t words = table.range_buckets * kBucketWords;
  release_fence();     // a reader of any later word sees that the other range is active
  if (rehashes > 0) {  // before the first rehash it is untouched
    for (int64_t w = 0; w < words; ++w) store_word(to + w, 0);
  }
  for (int64_t b = 0; b < table.range_buckets; ++b) {
    const int64_t* line = line_of(from, b);
    for (int64_t j = 0; j < kBucketWidth; ++j) {
      const int64_t stored = load_word(line + kBucketWidth + j);
      if (stored <= 0) continue;
      const int64_t id = load_word(line + j);
      place(free_slot_of(table, to, id), id, stored);
    }
  }
  store_word_release(table.active, rehashes + 1);
  writer.counters[kLiveTableTombstones] = 0;
}

LiveOutcome apply_live(const LiveWriter& writer, const LiveUpdate& update) {
  std::vector<int64_t> gone;
  const LiveOutcome outcome = plan(writer, update, gone);
  if (outcome.wanted > outcome.free) return outcome;
  for (const int64_t id : gone) {
    const Slot slot = slot_of(writer.table, active_range(writer.table), id);
    check_sound(slot.line != nullptr);
    erase(writer, slot);
  }
  int64_t* counters = writer.counters;
  if (needs_live_rehash(writer.table.range_buckets, counters[kLiveTableSize],
                        counters[kLiveTableTombstones], outcome.inserted)) {
    rehash_live(writer);
  }
  int64_t* range = active_range(writer.table);
  for (int64_t i = 0; i < update.count; ++i) {
    if (i + 2 * kAhead < update.count) {
      prefetch_line(writer.table, range, update.ids[i + 2 * kAhead]);
    }
    if (i + kAhead < update.count) prefetch_row(writer.table, range, update.ids[i + kAhead]);
    const int64_t id = update.ids[i];
    const char* packed = static_cast<const char*>(update.packed) + 8 * i * writer.table.row_words;
    const Slot slot = slot_of(writer.table, range, id);
    if (slot.line == nullptr) {
      insert(writer, id, packed);
    } else {
      replace(writer, slot, packed);
    }
  }
  counters[kLiveTableInserted] += outcome.inserted;
  counters[kLiveTableUpdated] += outcome.updated;
  counters[kLiveTableErased] += outcome.erased;
  // a list of ids that was made beside this update sees it
  store_word_release(counters + kLiveTableBatches, counters[kLiveTableBatches] + 1);
  return outcome;
}

}  // namespace dynemb::cpu
