#include "cpu/index/one_pass.h"

#include <algorithm>
#include <vector>

#include "cpu/index/find_block.h"
#include "cpu/index/placement.h"
#include "cpu/index/probe.h"

namespace dynemb::cpu {
namespace {

// New ids with full first buckets, in order of occurrence. They are placed after all others; until
// then they are looked up here.
class Displaced {
 public:
  // The stored handle of an id, or 0.
  int64_t find(uint64_t hash, int64_t id, int32_t table) const {
    if (entries_.empty()) return 0;
    const uint64_t slot = slots_[slot_of(hash, id, table)];
    return slot == 0 ? 0 : entry_of(slot).stored;
  }

  // Adds an id that `find` has not found.
  void add(const Entry& entry) {
    if (2 * (entries_.size() + 1) > slots_.size()) enlarge();
    entries_.push_back(entry);
    slots_[slot_of(entry.hash, entry.key, entry.table)] = tag_of(entry.hash) | entries_.size();
  }

  // Prefetches the first slot for `find`.
  void prefetch(uint64_t hash) const {
    if (!slots_.empty())
      __builtin_prefetch(&slots_[static_cast<size_t>(hash) & (slots_.size() - 1)]);
  }

  const std::vector<Entry>& entries() const { return entries_; }

  // Forgets all ids. The memory is kept, unless it is large.
  void clear() {
    constexpr size_t kKeptEntries = size_t{1} << 19;
    if (entries_.capacity() > kKeptEntries) *this = Displaced{};
    entries_.clear();
    std::fill(slots_.begin(), slots_.end(), 0);
  }

 private:
  // Bits of a hash that are kept in slots, to skip entries of other ids.
  static constexpr uint64_t kNumberMask = (uint64_t{1} << 32) - 1;
  static uint64_t tag_of(uint64_t hash) { return hash & ~kNumberMask; }
  const Entry& entry_of(uint64_t slot) const { return entries_[(slot & kNumberMask) - 1]; }

  // Slot of the id, present or not. The high bits of hashes are equal for ids that share a bucket.
  size_t slot_of(uint64_t hash, int64_t id, int32_t table) const {
    const size_t mask = slots_.size() - 1;
    size_t at = static_cast<size_t>(hash) & mask;
    for (; slots_[at] != 0; at = (at + 1) & mask) {
      if (tag_of(slots_[at]) != tag_of(hash)) continue;
      const Entry& entry = entry_of(slots_[at]);
      if (entry.key == id && entry.table == table) break;
    }
    return at;
  }

  void enlarge() {
    slots_.assign(std::max<size_t>(64, 2 * slots_.size()), 0);
    for (size_t i = 0; i < entries_.size(); ++i) {
      const Entry& entry = entries_[i];
      slots_[slot_of(entry.hash, entry.key, entry.table)] = tag_of(entry.hash) | (i + 1);
    }
  }

  std::vector<Entry> entries_;
  std::vector<uint64_t> slots_;  // tag and number of an entry, from 1 on; a power of two in size
};

struct TileInsertion {
  FindJob find;
  int32_t table;
  int64_t slab;
  int64_t first_new;  // handles from here on were given out in this call
  RowAllocator* allocator;
  Displaced* displaced;
  const void* memory;  // counters of the index
  int64_t added;       // out: ids
  int64_t reused;      // out: tombstones that ids have taken
  int64_t missed;      // out: occurrences of ids that were new in the call
};

// A bit for each slot of a bucket.
struct SlotMasks {
  int64_t empty;
  int64_t free;  // empty ones and tombstones
};
DYNEMB_INLINE SlotMasks free_slots(const int64_t* line) {
  SlotMasks masks{0, 0};
#pragma GCC unroll 8
  for (int j = 0; j < kBucketWidth; j += 4) {
    const Words4 stored = load_words(line + kBucketWidth + j);
    const Words4 bits = Words4{1, 2, 4, 8} << j;
    masks.empty |= or_words(((load_words(line + j) | stored) == 0) & bits);
    masks.free |= or_words((stored == 0) & bits);
  }
  return masks;
}

// Puts a new id into the first slot of `free`, which is not empty.
DYNEMB_INLINE void put_new(TileInsertion& job, int64_t id, int64_t stored, int64_t bucket,
                           int64_t free) {
  const TableView& table = job.find.table;
  int64_t* line = table.line(bucket);
  const int slot = __builtin_ctzll(static_cast<uint64_t>(free));
  job.reused += line[slot] != 0;
  fill_slot(job.memory, line, slot, id, stored);
  if (table.scores == nullptr) return;
  int64_t* score = table.score(bucket, slot);
  score[kStepWord] = job.find.update.step;
  for (int64_t w = 1; w < table.score_words; ++w) score[w * kBucketWidth] = 0;
}

// The stored handle of an id that was absent when its buckets were compared: that of an equal id
// inserted since, or of the row that it gets now.
DYNEMB_INLINE int64_t stored_of_absent(TileInsertion& job, int64_t id, uint64_t hash,
                                       int64_t bucket) {
  const FindJob& find = job.find;
  const int64_t* line = find.table.line(bucket);
  const int64_t repeated = match_stored(line, id);
  if (repeated != 0) return repeated;
  const SlotMasks slots = free_slots(line);
  if (slots.empty == 0) {
    const int64_t waiting = job.displaced->find(hash, id, job.table);
    if (waiting != 0) return waiting;
  }
  ++job.added;
  const int64_t stored = encode_handle(job.allocator->take(job.slab));
  if (slots.free != 0) {
    put_new(job, id, stored, bucket, slots.free);
  } else {
    Entry entry{hash, id, stored, job.table, 0, {}};
    entry.score[kStepWord] = find.update.step;
    job.displaced->add(entry);
  }
  return stored;
}

DYNEMB_INLINE void insert_absent(TileInsertion& job, const Block& block) {
  const FindJob& find = job.find;
  const int64_t* ids = find.ids + block.begin;
  int64_t* handles = find.handles + block.begin;
  for (uint64_t absent = block.absent; absent != 0; absent &= absent - 1) {
    const int i = __builtin_ctzll(absent);
    if (find.table.has_padding && ids[i] == find.table.padding_id) {
      handles[i] = kPaddingHandle;
      ++*find.padding_count;
      continue;
    }
    handles[i] = decode_handle(stored_of_absent(job, ids[i], block.hash[i], block.bucket[i]));
  }
  int64_t missed = 0;
  for (int64_t i = 0; i < block.count; ++i) missed += handles[i] >= job.first_new;
  job.missed += missed;
}

// Rows are given out in the last stage, which blocks reach in order. Earlier stages see the index
// with or without the new ids of the blocks ahead. This does not affect known ids: new ids only go
// into free slots of their first buckets. The last stage detects ids that were inserted meanwhile.
DYNEMB_INLINE void insert_tile_body(TileInsertion& job) {
  const int64_t block_count = (job.find.count + kProbeBlock - 1) / kProbeBlock;
  Block blocks[kFindStages];
  for (int64_t b = 0; b < block_count + kFindStages - 1; ++b) {
    if (b < block_count) start_block(job.find, b * kProbeBlock, blocks[b % kFindStages]);
    match_blocks(job.find, blocks, b, block_count);
    if (b >= 1 && b <= block_count) {
      const Block& matched = blocks[(b - 1) % kFindStages];
      for (int64_t r = 0; r < matched.later_count; ++r) {
        job.displaced->prefetch(matched.hash[matched.later[r]]);
      }
    }
    const int64_t last = b - kFindStages + 1;
    if (last < 0) continue;
    Block& block = blocks[last % kFindStages];
    match_rest(job.find, block);
    insert_absent(job, block);
  }
}
DYNEMB_SIMD_VARIANTS(insert_tile, (TileInsertion & job), (job))

}  // namespace

bool fits_one_pass(const IndexArgs& index, const FeatureArgs& features, const PolicyArgs& policies,
                   const RowAllocator& allocator) {
  if (!policies.empty()) return false;
  std::vector<int64_t> ids(static_cast<size_t>(index.table_count), 0);
  for (size_t f = 0; f < features.table.size(); ++f) {
    ids[features.table[f]] += features.begin[f + 1] - features.begin[f];
  }
  std::vector<int64_t> rows(static_cast<size_t>(allocator.slab_count()), 0);
  for (int64_t t = 0; t < index.table_count; ++t) {
    if (ids[t] == 0) continue;
    const int64_t* row = index.table_row(t);
    const int64_t* meta = index.meta_row(t);
    if (decide_growth(row[kTableBucketCount], meta[kMetaRegionBuckets], row[kTableSize],
                      row[kTableTombstones], ids[t])
            .rehash) {
      return false;
    }
    rows[meta[kMetaSlab]] += ids[t];
  }
  return allocator.fits_fresh(rows);
}

bool one_thread_beats_two(const IndexArgs& index, const FeatureArgs& features) {
  constexpr int64_t kSampledIds = 1 << 14;  // for smaller calls the sample would cost too much
  constexpr int64_t kSample = 32;
  if (features.count < kSampledIds) return false;
  int64_t absent = 0;
  size_t f = 0;
  for (int64_t k = 0; k < kSample; ++k) {
    const int64_t i = features.count / kSample * k;
    while (features.begin[f + 1] <= i) ++f;
    const TableView table = index.table(features.table[f]);
    const int64_t id = features.ids[i];
    absent += probe(table, id, first_hash(id, table.salt), 0).bucket < 0;
  }
  return absent > kSample / 2;
}

void insert_in_one_pass(const IndexArgs& index, const FeatureArgs& features,
                        const PolicyArgs& policies, RowAllocator* allocator, int64_t* handles) {
  std::vector<int64_t> first_new(static_cast<size_t>(allocator->slab_count()));
  for (size_t s = 0; s < first_new.size(); ++s) {
    first_new[s] = allocator->first_fresh(static_cast<int64_t>(s));
  }
  // Kept between calls: fresh memory would cost page faults in every call.
  static thread_local Displaced displaced;
  displaced.clear();
  for (size_t f = 0; f < features.table.size(); ++f) {
    const int64_t table = features.table[f];
    const int64_t begin = features.begin[f];
    const int64_t count = features.begin[f + 1] - begin;
    const int64_t slab = index.meta_row(table)[kMetaSlab];
    int64_t padding = 0;
    TileInsertion job{{index.table(table), features.ids + begin, count, handles + begin, nullptr,
                       nullptr, &padding, policies.update(static_cast<int64_t>(f), table)},
                      static_cast<int32_t>(table),
                      slab,
                      first_new[slab],
                      allocator,
                      &displaced,
                      index.tables,
                      0,
                      0,
                      0};
    insert_tile(job);
    int64_t* row = index.table_row(table);
    row[kTableSize] += job.added;
    row[kTableInserted] += job.added;
    row[kTableTombstones] -= job.reused;
    row[kTableFound] += count - padding - job.missed;
    row[kTableMissed] += job.missed;
  }
  place_displaced(index, entry_list(displaced.entries()));
}

}  // namespace dynemb::cpu
