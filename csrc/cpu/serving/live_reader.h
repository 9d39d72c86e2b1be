// Reads rows of a live table by id, without locks, while another thread updates it.
//
// A reader finds the handle of its id, copies the row, and finds the handle again in the same line
// of the index; if it has changed, the reader begins anew. It never waits: the handle in the index
// always names a whole row. The result is the row of one version, from before or from after a
// concurrent update, and includes every update that has ended.
//
// The second look is enough. A handle is never given out twice, and its row is written before it is
// in the index and not again until it has left. A copy made in between is whole.
//
// kValidated is true except in a test, which shows that readers without the check see torn and
// foreign rows.
#pragma once

#include <algorithm>
#include <cstring>

#include "cpu/index/probe_block.h"
#include "cpu/serving/live_table.h"

namespace dynemb::cpu {

enum class LiveRead { kRead, kMissing, kDamaged };

// The stored handle that a line of the index has of an id, 0 if it has none. Of two handles of an
// id that moves between slots it is either. The keys are loaded first: if the handle is one that
// the line had of the id before an acquire fence, the id has owned it all the time.
DYNEMB_INLINE int64_t match_live(const int64_t* line, int64_t id) {
  int64_t found = 0;
  bool is_key[kBucketWidth];
  for (int j = 0; j < kBucketWidth; ++j) is_key[j] = load_word_acquire(line + j) == id;
  for (int j = 0; j < kBucketWidth; ++j) {
    const int64_t stored = load_word_acquire(line + kBucketWidth + j);
    found = is_key[j] ? std::max(found, stored) : found;
  }
  return found;
}

// The same for four ids, each in its bucket. An acquire fence precedes reads of their rows.
DYNEMB_INLINE void match_four_live(const int64_t* range, const int64_t* bucket, const int64_t* ids,
                                   int64_t* stored) {
  static_assert(kBucketWidth == 4, "keys, and handles, are one vector");
  const auto line = [&](int i) { return range + bucket[i] * kBucketWords; };
  const auto is_key = [&](int i) {
    return load_words(line(i)) == Words4{ids[i], ids[i], ids[i], ids[i]};
  };
  const Words4 keys[] = {is_key(0), is_key(1), is_key(2), is_key(3)};
  acquire_fence();
  const auto handles = [&](int i) { return keys[i] & load_words(line(i) + kBucketWidth); };
  const Words4 four = reduce_four(handles(0), handles(1), handles(2), handles(3),
                                  [](Words4 a, Words4 b) { return a > b ? a : b; });
  std::memcpy(stored, &four, sizeof four);
}

DYNEMB_INLINE bool has_empty_live(const int64_t* line) {
  bool empty = false;
#pragma GCC unroll 8
  for (int j = 0; j < kBucketWidth; ++j) {
    empty |= load_word_acquire(line + kBucketWidth + j) == 0;
  }
  return empty;
}

struct LivePlace {
  int64_t bucket;
  int64_t stored;  // 0: the id is missing
};

// Finds an id in a range of buckets, from probe `first` on.
DYNEMB_INLINE LivePlace find_live(const LiveTable& table, const int64_t* range, int64_t id,
                                  uint64_t hash, int64_t first) {
  const ProbeSequence sequence(hash, table.range_buckets);
  for (int64_t i = first; i < sequence.length(); ++i) {
    const int64_t* line = line_of(range, sequence.at(i));
    const int64_t stored = match_live(line, id);
    if (stored != 0) return {sequence.at(i), stored};
    if (has_empty_live(line)) break;
  }
  return {0, 0};
}

// Copies the values of a row; false if the row does not exist. kValidated: it may change meanwhile,
// which the caller finds out afterwards.
template <bool kValidated>
DYNEMB_INLINE bool copy_live_row(const LiveTable& table, int64_t stored, char* values) {
  const int64_t number = handle_row(decode_handle(stored));
  if (static_cast<uint64_t>(number) >= static_cast<uint64_t>(table.row_count)) return false;
  const int64_t* row = table.row(number);
  if constexpr (!kValidated) {
    std::memcpy(values, row, static_cast<size_t>(8 * table.row_words));
    return true;
  }
  int64_t w = 0;
  for (; w + 4 <= table.row_words; w += 4) {
    const Words4 words = load_words(row + w);
    std::memcpy(values + 8 * w, &words, sizeof words);
  }
  if (w < table.row_words) {  // their number is even
    const int64_t words[] = {load_word(row + w), load_word(row + w + 1)};
    std::memcpy(values + 8 * w, words, sizeof words);
  }
  return true;
}

// Finds an id and copies its row, until both match.
template <bool kValidated>
inline LiveRead read_live_again(const LiveTable& table, int64_t id, uint64_t hash, char* values) {
  // The index replaces a handle before its row changes, so a reader that has to begin anew does not
  // see the old handle again; only a damaged index repeats it forever.
  constexpr int kMostRepeats = 64;
  int64_t last = 0;
  for (int repeats = 0; repeats < kMostRepeats;) {
    const int64_t active = load_word_acquire(table.active);
    const int64_t* range = table.range(active);
    const LivePlace place = find_live(table, range, id, hash, 0);
    const bool copied = place.stored != 0 && copy_live_row<kValidated>(table, place.stored, values);
    acquire_fence();
    // a range that is no longer active is not kept up to date, and may be cleared
    if (!kValidated || load_word(table.active) == active) {
      if (place.stored == 0) return LiveRead::kMissing;
      const int64_t* line = line_of(range, place.bucket);
      if (copied && (!kValidated || match_live(line, id) == place.stored)) return LiveRead::kRead;
    }
    if (place.stored == 0) continue;
    repeats = place.stored == last ? repeats + 1 : 0;
    last = place.stored;
  }
  return LiveRead::kDamaged;
}

DYNEMB_INLINE void prefetch_live_row(const LiveTable& table, int64_t stored) {
  const int64_t number = handle_row(decode_handle(stored));
  if (static_cast<uint64_t>(number) >= static_cast<uint64_t>(table.row_count)) return;
  const auto* bytes = reinterpret_cast<const char*>(table.row(number));
  const int64_t fetched = std::min<int64_t>(8 * table.row_words, 512);  // the rest follows
  for (int64_t byte = 0; byte < fetched; byte += 64) __builtin_prefetch(bytes + byte);
  // rows of partial cache lines may end in one more
  if (table.row_words % 8 != 0) __builtin_prefetch(bytes + fetched - 1);
}

// Ids go through three stages, a block at each: the line of the bucket is fetched, then the row,
// then the row is read.
constexpr int64_t kLiveBlock = 64;

struct LiveBlock {
  int64_t begin;
  int64_t count;
  uint64_t hash[kLiveBlock];
  int64_t bucket[kLiveBlock];  // in which the handle is
  int64_t stored[kLiveBlock];  // 0: the id is missing
};

DYNEMB_INLINE void start_live_block(const LiveTable& table, const int64_t* range,
                                    const int64_t* ids, LiveBlock& block) {
  for (int64_t i = 0; i < block.count; ++i) {
    block.hash[i] = first_hash(ids[block.begin + i], table.salt);
    block.bucket[i] = bucket_of(block.hash[i], table.range_buckets);
    __builtin_prefetch(line_of(range, block.bucket[i]));
  }
}

DYNEMB_INLINE void find_live_block(const LiveTable& table, const int64_t* range, const int64_t* ids,
                                   LiveBlock& block) {
  ids += block.begin;
  int32_t later[kLiveBlock];
  int64_t later_count = 0;
  const auto take = [&](int64_t i) {
    prefetch_live_row(table, block.stored[i]);
    later[later_count] = static_cast<int32_t>(i);
    later_count += block.stored[i] == 0;
  };
  int64_t i = 0;
  for (; i + 4 <= block.count; i += 4) {
    match_four_live(range, block.bucket + i, ids + i, block.stored + i);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) take(i + j);
  }
  for (; i < block.count; ++i) {
    block.stored[i] = match_live(line_of(range, block.bucket[i]), ids[i]);
    take(i);
  }
  int64_t going_on = 0;
  for (int64_t l = 0; l < later_count; ++l) {
    const int64_t at = later[l];
    if (has_empty_live(line_of(range, block.bucket[at]))) continue;
    __builtin_prefetch(line_of(range, bucket_of(second_hash(block.hash[at]), table.range_buckets)));
    later[going_on++] = later[l];
  }
  for (int64_t l = 0; l < going_on; ++l) {
    const int64_t at = later[l];
    const LivePlace place = find_live(table, range, ids[at], block.hash[at], 1);
    if (place.stored == 0) continue;
    block.stored[at] = place.stored;
    block.bucket[at] = place.bucket;
    prefetch_live_row(table, place.stored);
  }
}

// Bytes of a row.
DYNEMB_INLINE int64_t live_slot_bytes(const LiveTable& table) { return 8 * table.row_words; }

// Reads `count` ids, in order: sink.take(first, row, count, complete) gets copies in `slots` of the
// rows of some ids, nullptr for missing ones, and whether none is missing. `slots`: memory of
// kLiveSlots rows. Returns the first id with a damaged row, -1: none.
constexpr int64_t kLiveSlots = 16;

// Ids [first, first + count) of a block. Returns the first one with a damaged row, -1: none.
template <bool kValidated>
DYNEMB_INLINE int64_t read_live_rows(const LiveTable& table, int64_t active, const LiveBlock& block,
                                     const int64_t* ids, int64_t first, int64_t count, char* slots,
                                     const char** row) {
  const int64_t* range = table.range(active);
  const int64_t bytes = live_slot_bytes(table);
  bool copied[kLiveSlots];
  acquire_fence();  // rows are read after their handles
  for (int64_t r = 0; r < count; ++r) {
    const int64_t stored = block.stored[first + r];
    copied[r] = stored != 0 && copy_live_row<kValidated>(table, stored, slots + r * bytes);
    row[r] = slots + r * bytes;
  }
  acquire_fence();
  // a rehash may have cleared the range before it was searched, and later updates pass it by
  const bool current = !kValidated || load_word(table.active) == active;
  int64_t now[kLiveSlots];
  int64_t r = 0;
  for (; kValidated && r + 4 <= count; r += 4) {
    match_four_live(range, block.bucket + first + r, ids + r, now + r);
  }
  for (; kValidated && r < count; ++r) {
    now[r] = match_live(line_of(range, block.bucket[first + r]), ids[r]);
  }
  for (r = 0; r < count; ++r) {
    const int64_t stored = block.stored[first + r];
    if (current && copied[r] && (!kValidated || now[r] == stored)) continue;
    if (current && stored == 0) {
      row[r] = nullptr;
      continue;
    }
    char* values = slots + r * bytes;
    const LiveRead outcome =
        read_live_again<kValidated>(table, ids[r], block.hash[first + r], values);
    if (outcome == LiveRead::kDamaged) return r;
    if (outcome == LiveRead::kMissing) row[r] = nullptr;
  }
  return -1;
}

template <bool kValidated, class Sink>
DYNEMB_INLINE int64_t read_live(const LiveTable& table, const int64_t* ids, int64_t count,
                                char* slots, Sink& sink) {
  if (count == 0) return -1;
  const int64_t active = load_word_acquire(table.active);
  const int64_t* range = table.range(active);
  LiveBlock blocks[3];
  const int64_t total = (count + kLiveBlock - 1) / kLiveBlock;
  for (int64_t b = 0; b < total + 2; ++b) {
    if (b < total) {
      LiveBlock& block = blocks[b % 3];
      block.begin = b * kLiveBlock;
      block.count = std::min(kLiveBlock, count - block.begin);
      start_live_block(table, range, ids, block);
    }
    if (b >= 1 && b < total + 1) find_live_block(table, range, ids, blocks[(b - 1) % 3]);
    if (b < 2) continue;
    const LiveBlock& block = blocks[(b - 2) % 3];
    for (int64_t first = 0; first < block.count; first += kLiveSlots) {
      const char* row[kLiveSlots];
      const int64_t rows = std::min(kLiveSlots, block.count - first);
      const int64_t at = block.begin + first;
      const int64_t damaged =
          read_live_rows<kValidated>(table, active, block, ids + at, first, rows, slots, row);
      if (damaged >= 0) return at + damaged;
      bool complete = true;
      for (int64_t r = 0; r < rows; ++r) complete &= row[r] != nullptr;
      sink.take(at, row, rows, complete);
    }
  }
  return -1;
}

}  // namespace dynemb::cpu
