// Reads rows of a live table by id, without locks, while another thread updates it.
//
// A reader finds the handle of its id, copies the row, and checks that the row was whole and
// belonged to the id all the time; if not, it finds the id again. It never waits: the handle in the
// index always names a whole row. The result is the row of one version, from before or from after a
// concurrent update, and includes every update that has ended.
//
// kValidated is true except in a test, which shows that readers without the check see torn and
// foreign rows.
#pragma once

#include <algorithm>
#include <cstring>

#include "cpu/serving/live_table.h"

namespace dynemb::cpu {

enum class LiveRead { kRead, kMissing, kDamaged };

// The stored handle of `id` in the bucket, 0 if it is missing.
DYNEMB_INLINE int64_t match_live(const int64_t* line, int64_t id) {
  int64_t found = 0;
#pragma GCC unroll 8
  for (int j = 0; j < kBucketWidth; ++j) {
    const int64_t stored = load_word_acquire(line + kBucketWidth + j);
    const int64_t is_match = -static_cast<int64_t>((load_word(line + j) == id) & (stored > 0));
    // not "or": an id that moves between slots may be seen twice. And no branch, which would be
    // mispredicted half of the time
    found ^= (found ^ stored) & is_match;
  }
  return found;
}

DYNEMB_INLINE bool has_empty_live(const int64_t* line) {
  bool empty = false;
#pragma GCC unroll 8
  for (int j = 0; j < kBucketWidth; ++j) {
    empty |= load_word_acquire(line + kBucketWidth + j) == 0;
  }
  return empty;
}

// match_live over the buckets of a range from probe `first` on.
DYNEMB_INLINE int64_t find_live(const LiveTable& table, int64_t* range, int64_t id, uint64_t hash,
                                int64_t first) {
  const ProbeSequence sequence(hash, table.range_buckets);
  for (int64_t i = first; i < sequence.length(); ++i) {
    const int64_t* line = line_of(range, sequence.at(i));
    const int64_t stored = match_live(line, id);
    if (stored != 0) return stored;
    if (has_empty_live(line)) break;
  }
  return 0;
}

// Copies the stored values of a row; false unless it was whole and belonged to the id from begin to
// end.
template <bool kValidated>
DYNEMB_INLINE bool copy_live_row(const LiveTable& table, int64_t stored, int64_t id, char* values) {
  const int64_t handle = decode_handle(stored);
  const int64_t number = handle_row(handle);
  if (static_cast<uint64_t>(number) >= static_cast<uint64_t>(table.row_count)) return false;
  const int64_t* row = table.row(number);
  if (kValidated && load_word(row + kLiveIdWord) != id) return false;
  const int64_t generation = load_word_acquire(row + kLiveGenerationWord);
  if (kValidated && generation != handle_generation(handle)) return false;
  const int64_t words = table.row_words - kLiveHeaderWords;
  for (int64_t w = 0; w < words; w += 2) {
    const int64_t two[] = {load_word(row + kLiveHeaderWords + w),
                           load_word(row + kLiveHeaderWords + w + 1)};
    std::memcpy(values + 8 * w, two, sizeof two);
  }
  if (kValidated) {
    acquire_fence();
    return load_word(row + kLiveGenerationWord) == generation;
  }
  return true;
}

// Finds an id and copies its row, until both match.
template <bool kValidated>
inline LiveRead read_live_again(const LiveTable& table, int64_t id, uint64_t hash, char* values) {
  // The index replaces a handle before its row changes, so a reader that saw the row change does
  // not see the old handle again; only a damaged index repeats it forever.
  constexpr int kMostRepeats = 64;
  int64_t last = 0;
  for (int repeats = 0; repeats < kMostRepeats;) {
    const int64_t active = load_word_acquire(table.active);
    const int64_t stored = find_live(table, table.range(active), id, hash, 0);
    if (stored == 0) {
      acquire_fence();
      if (!kValidated || load_word(table.active) == active) return LiveRead::kMissing;
      continue;  // the range may have been cleared meanwhile
    }
    if (copy_live_row<kValidated>(table, stored, id, values)) return LiveRead::kRead;
    acquire_fence();
    repeats = stored == last ? repeats + 1 : 0;
    last = stored;
  }
  return LiveRead::kDamaged;
}

DYNEMB_INLINE void prefetch_live_row(const LiveTable& table, int64_t stored) {
  if (stored == 0) return;
  const int64_t number = handle_row(decode_handle(stored));
  if (static_cast<uint64_t>(number) >= static_cast<uint64_t>(table.row_count)) return;
  const auto* bytes = reinterpret_cast<const char*>(table.row(number));
  const int64_t fetched = std::min<int64_t>(8 * table.row_words, 512);  // the rest follows
  for (int64_t byte = 0; byte < fetched; byte += 64) __builtin_prefetch(bytes + byte);
  __builtin_prefetch(bytes + fetched - 1);
}

// Ids go through three stages, a block at each: the line of the bucket is fetched, then the row,
// then the row is read.
constexpr int64_t kLiveBlock = 64;

struct LiveBlock {
  int64_t begin;
  int64_t count;
  uint64_t hash[kLiveBlock];
  int64_t bucket[kLiveBlock];
  int64_t stored[kLiveBlock];
};

DYNEMB_INLINE void start_live_block(const LiveTable& table, int64_t* range, const int64_t* ids,
                                    LiveBlock& block) {
  for (int64_t i = 0; i < block.count; ++i) {
    block.hash[i] = first_hash(ids[block.begin + i], table.salt);
    block.bucket[i] = bucket_of(block.hash[i], table.range_buckets);
    __builtin_prefetch(line_of(range, block.bucket[i]));
  }
}

DYNEMB_INLINE void find_live_block(const LiveTable& table, int64_t* range, const int64_t* ids,
                                   LiveBlock& block) {
  int32_t retry[kLiveBlock];
  int64_t retries = 0;
  for (int64_t i = 0; i < block.count; ++i) {
    block.stored[i] = match_live(line_of(range, block.bucket[i]), ids[block.begin + i]);
    prefetch_live_row(table, block.stored[i]);
    retry[retries] = static_cast<int32_t>(i);
    retries += block.stored[i] == 0;
  }
  int64_t going_on = 0;
  for (int64_t r = 0; r < retries; ++r) {
    const int64_t i = retry[r];
    if (has_empty_live(line_of(range, block.bucket[i]))) continue;
    __builtin_prefetch(line_of(range, bucket_of(second_hash(block.hash[i]), table.range_buckets)));
    retry[going_on++] = retry[r];
  }
  for (int64_t r = 0; r < going_on; ++r) {
    const int64_t i = retry[r];
    block.stored[i] = find_live(table, range, ids[block.begin + i], block.hash[i], 1);
    prefetch_live_row(table, block.stored[i]);
  }
}

// The row of id i of a block, copied to `values` unless the id is missing.
template <bool kValidated>
DYNEMB_INLINE LiveRead read_live_row(const LiveTable& table, int64_t active, const LiveBlock& block,
                                     int64_t i, int64_t id, char* values) {
  if (block.stored[i] != 0) {
    if (copy_live_row<kValidated>(table, block.stored[i], id, values)) return LiveRead::kRead;
    return read_live_again<kValidated>(table, id, block.hash[i], values);
  }
  if (kValidated) {
    acquire_fence();  // a rehash may have cleared the range before it was searched
    if (load_word(table.active) != active) {
      return read_live_again<kValidated>(table, id, block.hash[i], values);
    }
  }
  return LiveRead::kMissing;
}

// Bytes of the stored values of a row.
DYNEMB_INLINE int64_t live_slot_bytes(const LiveTable& table) {
  return 8 * (table.row_words - kLiveHeaderWords);
}

// Reads `count` ids, in order: sink.take(first, row, count, complete) gets copies in `slots` of the
// rows of some ids, nullptr for missing ones, and whether none is missing. `slots`: memory of
// kLiveSlots rows. Returns the first id with a damaged row, -1: none.
constexpr int64_t kLiveSlots = 16;

template <bool kValidated, class Sink>
DYNEMB_INLINE int64_t read_live(const LiveTable& table, const int64_t* ids, int64_t count,
                                char* slots, Sink& sink) {
  if (count == 0) return -1;
  const int64_t active = load_word_acquire(table.active);
  int64_t* range = table.range(active);
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
      bool complete = true;
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t at = block.begin + first + r;
        char* values = slots + r * live_slot_bytes(table);
        const LiveRead outcome =
            read_live_row<kValidated>(table, active, block, first + r, ids[at], values);
        if (outcome == LiveRead::kDamaged) return at;
        row[r] = outcome == LiveRead::kRead ? values : nullptr;
        complete &= outcome == LiveRead::kRead;
      }
      sink.take(block.begin + first, row, rows, complete);
    }
  }
  return -1;
}

}  // namespace dynemb::cpu
