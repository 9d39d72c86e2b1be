#include "index.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <new>

namespace evicting {
namespace {

constexpr int64_t kIdsAhead = 32;   // with lines on their way
constexpr int64_t kNewAhead = 12;   // new ids, likewise
constexpr int64_t kTakenAhead = 8;  // victims, likewise
constexpr int64_t kGeneration = 1;
constexpr size_t kHugePage = size_t{2} << 20;

// Zeros in huge pages, which std::free gives back.
template <class T>
T* zeros(int64_t count) {
  const size_t pages = (static_cast<size_t>(count) * sizeof(T) + kHugePage - 1) / kHugePage;
  void* memory = std::aligned_alloc(kHugePage, pages * kHugePage);
  if (memory == nullptr) throw std::bad_alloc();
  madvise(memory, pages * kHugePage, MADV_HUGEPAGE);
  std::fill_n(static_cast<char*>(memory), pages * kHugePage, 0);
  return static_cast<T*>(memory);
}

int find_in(const Index& index, int64_t bucket, int64_t id) {
  const int64_t* line = index.line(bucket);
  int slot = -1;
  for (int s = 0; s < kSlots; ++s) slot = line[s] == id && line[kSlots + s] != 0 ? s : slot;
  return slot;
}

bool is_full(const Index& index, int64_t bucket) {
  const int64_t* line = index.line(bucket);
  bool full = true;
  for (int s = 0; s < kSlots; ++s) full &= line[kSlots + s] != 0;
  return full;
}

int64_t see(const Index& index, int64_t bucket, int slot) {
  int64_t* score = index.score(bucket) + slot;
  *score = index.frequent ? *score + 1 : index.step;
  return index.line(bucket)[kSlots + slot];
}

bool put(const Index& index, int64_t bucket, int64_t id, int64_t row) {
  int64_t* line = index.line(bucket);
  for (int s = 0; s < kSlots; ++s) {
    if (line[kSlots + s] != 0) continue;
    line[s] = id;
    line[kSlots + s] = row;
    index.score(bucket)[s] = index.frequent ? 1 : index.step;
    return true;
  }
  return false;
}

// Into the second cache: what is fetched into the first one occupies one of its few buffers until
// it has come.
void fetch(const int64_t* words) { __builtin_prefetch(words, 0, 2); }

void insert(const Index& index, const Missing& missing, int64_t id, int64_t row) {
  if (put(index, missing.bucket, id, row)) return;
  int64_t bucket = missing.second;
  while (!put(index, bucket, id, row)) bucket = index.next(bucket);
}

// The slot with the least score in sight. kLines: free slots are those without a row, so that an
// occupied one may have the score 0.
template <bool kLines>
int64_t find_victim(const Index& index, int64_t bucket) {
  const auto* scores = reinterpret_cast<const uint64_t*>(index.score(bucket));
  uint64_t best[kSlots];
  int64_t place[kSlots];
  std::fill_n(best, kSlots, UINT64_MAX);
  std::fill_n(place, kSlots, 0);
  for (int64_t k = 0; k < kVictims; ++k) {
    const int64_t* line = index.line(bucket + k);
    for (int64_t s = 0; s < kSlots; ++s) {
      uint64_t score = scores[k * kSlots + s] - 1;  // empty slots come last
      if (kLines) score = line[kSlots + s] == 0 ? UINT64_MAX : score + 1;
      place[s] = score < best[s] ? k : place[s];
      best[s] = score < best[s] ? score : best[s];
    }
  }
  int64_t least = 0;
  for (int64_t s = 1; s < kSlots; ++s) least = best[s] < best[least] ? s : least;
  return (bucket + place[least]) * kSlots + least;
}

// Frees the slot of a victim; its row, with the next generation.
int64_t take(const Index& index, int64_t victim) {
  int64_t* word = index.line(victim / kSlots) + victim % kSlots;
  const int64_t row = word[kSlots] + kGeneration;
  word[0] = word[kSlots] = 0;
  index.scores[victim] = 0;
  return row;
}

void find_in_first_buckets(const Index& index, const int64_t* ids, int64_t count, int64_t* rows,
                           std::vector<Missing>* missing) {
  for (int64_t i = 0; i < count; ++i) {
    if (i + kIdsAhead < count) {
      const int64_t ahead = index.first_bucket(index.hash(ids[i + kIdsAhead]));
      fetch(index.line(ahead));
      fetch(index.score(ahead));
    }
    const uint64_t hash = index.hash(ids[i]);
    const int64_t bucket = index.first_bucket(hash);
    const int slot = find_in(index, bucket, ids[i]);
    if (slot >= 0) {
      rows[i] = see(index, bucket, slot);
    } else {
      missing->push_back({bucket, index.second_bucket(hash), 0, static_cast<int32_t>(i)});
      fetch(index.line(missing->back().second));
    }
  }
}

void find_in_other_buckets(const Index& index, const int64_t* ids, int64_t* rows,
                           std::vector<Missing>* missing) {
  size_t absent = 0;
  for (const Missing& entry : *missing) {
    const int64_t id = ids[entry.position];
    int64_t bucket = entry.second;
    int slot = -1;
    if (is_full(index, entry.bucket)) {
      while ((slot = find_in(index, bucket, id)) < 0 && is_full(index, bucket)) {
        bucket = index.next(bucket);
      }
    }
    if (slot >= 0) {
      rows[entry.position] = see(index, bucket, slot);
    } else {
      (*missing)[absent++] = entry;
    }
  }
  missing->resize(absent);
}

void replace_victims(const Index& index, const int64_t* ids, int64_t* rows,
                     std::vector<Missing>* missing) {
  const auto count = static_cast<int64_t>(missing->size());
  for (int64_t m = 0; m < count + kTakenAhead; ++m) {
    if (m + kNewAhead < count) {
      const int64_t ahead = (*missing)[m + kNewAhead].bucket;
      const int64_t lines = index.reads_lines ? kVictims : 1;
      for (int64_t k = 0; k < lines; ++k) fetch(index.line(ahead + k));
      for (int64_t k = 0; k < kVictims; k += 2) fetch(index.score(ahead + k));
    }
    if (m < count) {
      Missing& entry = (*missing)[m];
      entry.victim = index.reads_lines ? find_victim<true>(index, entry.bucket)
                                       : find_victim<false>(index, entry.bucket);
      fetch(index.line(entry.victim / kSlots));
    }
    if (m < kTakenAhead) continue;
    const Missing& entry = (*missing)[m - kTakenAhead];
    rows[entry.position] = take(index, entry.victim);
    insert(index, entry, ids[entry.position], rows[entry.position]);
  }
}

}  // namespace

void look_up(const Index& index, const int64_t* ids, int64_t count, int64_t* rows,
             std::vector<Missing>* missing) {
  missing->clear();
  find_in_first_buckets(index, ids, count, rows, missing);
  find_in_other_buckets(index, ids, rows, missing);
  replace_victims(index, ids, rows, missing);
}

extern "C" {

// An index of `capacity` ids, each with a row that has its initial value; ids of a step count as
// seen `batch` by `batch`.
__attribute__((visibility("default"))) void* dynemb_peer_evicting_index(const int64_t* ids,
                                                                        int64_t capacity,
                                                                        int64_t batch, int frequent,
                                                                        int reads_lines) {
  auto* index = new Index;
  index->buckets = capacity * 10 / 7 / kSlots + 1;  // 70 % of the slots
  index->lines = zeros<int64_t>((index->buckets + kVictims) * 2 * kSlots);
  index->scores = zeros<int64_t>((index->buckets + kVictims) * kSlots);
  index->frequent = frequent != 0;
  index->reads_lines = reads_lines != 0;
  index->weights = zeros<float>(capacity * kDim);
  index->squares = zeros<float>(capacity);
  std::fill_n(index->weights, capacity * kDim, kInitialValue);
  for (int64_t i = 0; i < capacity; ++i) {
    index->step = 1 + i / batch;
    const uint64_t hash = index->hash(ids[i]);
    const Missing entry{index->first_bucket(hash), index->second_bucket(hash), 0, 0};
    insert(*index, entry, ids[i], (i << kRowShift) + kGeneration);
  }
  return index;
}

__attribute__((visibility("default"))) void dynemb_peer_evicting_index_delete(void* pointer) {
  auto* index = static_cast<Index*>(pointer);
  std::free(index->lines);
  std::free(index->scores);
  std::free(index->weights);
  std::free(index->squares);
  delete index;
}

__attribute__((visibility("default"))) void dynemb_peer_evicting_index_look_up(
    void* pointer, const int64_t* ids, int64_t count, int64_t* rows, int threads) {
  auto* index = static_cast<Index*>(pointer);
  ++index->step;
  run_threads(threads, [&](int thread) {
    static thread_local std::vector<Missing> missing;
    const int64_t begin = count * thread / threads;
    look_up(*index, ids + begin, count * (thread + 1) / threads - begin, rows + begin, &missing);
  });
}

}  // extern "C"

}  // namespace evicting
