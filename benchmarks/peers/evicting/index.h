// Reference kernel with the least work of a full index for a batch with new ids: it finds ids, and
// gives each new one the row of the id with the least score of eight buckets. Nothing is
// deduplicated, counted, logged or kept from being evicted in its own step; threads race for slots
// and rows, and slots in full buckets are freed without tombstones. So it cannot replace an index;
// it shows the cost of the memory traffic of eviction on this machine.
#pragma once

#include <cstdint>
#include <thread>
#include <vector>

namespace evicting {

constexpr int64_t kSlots = 4;    // of a bucket: four ids, and four rows with generations
constexpr int64_t kVictims = 8;  // buckets in which a victim is looked for
constexpr int kRowShift = 28;    // of a row's number, above its generation
constexpr int64_t kDim = 64;
constexpr float kInitialValue = 0.01f;

struct Index {
  int64_t* lines;   // [buckets + kVictims, 2 * kSlots]: nothing is put into the last kVictims
  int64_t* scores;  // [buckets + kVictims, kSlots]; 0: an empty slot
  int64_t buckets;
  int64_t step;
  bool frequent;     // scores count lookups; otherwise they are the step of the last one
  bool reads_lines;  // the search for a victim reads which slots are free, not only scores
  float* weights;    // [rows, kDim]
  float* squares;    // [rows]: sums of row-wise Adagrad

  uint64_t hash(int64_t id) const {
    uint64_t x = static_cast<uint64_t>(id);
    x ^= x >> 33;
    x *= 0xff51afd7ed558ccdULL;
    x ^= x >> 33;
    x *= 0xc4ceb9fe1a85ec53ULL;
    return x ^ (x >> 33);
  }
  int64_t first_bucket(uint64_t hash) const {
    return static_cast<int64_t>(
        (static_cast<unsigned __int128>(hash) * static_cast<uint64_t>(buckets)) >> 64);
  }
  int64_t second_bucket(uint64_t hash) const { return first_bucket(hash * 0x9e3779b97f4a7c15ULL); }
  int64_t next(int64_t bucket) const { return bucket + 1 == buckets ? 0 : bucket + 1; }
  int64_t* line(int64_t bucket) const { return lines + bucket * 2 * kSlots; }
  int64_t* score(int64_t bucket) const { return scores + bucket * kSlots; }
};

// An id that is not there.
struct Missing {
  int64_t bucket;
  int64_t second;
  int64_t victim;  // slot
  int32_t position;
};

// Rows and generations of ids; `missing` has those that were new and got another's row.
void look_up(const Index& index, const int64_t* ids, int64_t count, int64_t* rows,
             std::vector<Missing>* missing);

// run(thread) for each of them, on threads of its own but for the first.
template <class Run>
void run_threads(int threads, const Run& run) {
  std::vector<std::thread> others;
  for (int thread = 1; thread < threads; ++thread) others.emplace_back(run, thread);
  run(0);
  for (auto& other : others) other.join();
}

}  // namespace evicting
