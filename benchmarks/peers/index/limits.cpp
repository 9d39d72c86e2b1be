// Reference kernels of insertion into an index and of its growth, on buckets of four keys and four
// values in one line. They do only what any design must: ids of a full bucket have no other place,
// nothing is counted, and ids are taken to be new. They show the cost of the memory traffic on this
// machine.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

namespace {

constexpr int64_t kSlots = 4;
constexpr int64_t kLineWords = 2 * kSlots;
constexpr int64_t kLinesAhead = 24;
constexpr int64_t kOwnIds = 4096;  // that a thread picks out of all before it inserts them

uint64_t mixed(int64_t id) {
  uint64_t hash = static_cast<uint64_t>(id);
  hash ^= hash >> 33;
  hash *= 0xff51afd7ed558ccdULL;
  hash ^= hash >> 33;
  hash *= 0xc4ceb9fe1a85ec53ULL;
  return hash ^ hash >> 33;
}

int64_t line_of(uint64_t hash, int64_t lines) {
  const auto product = static_cast<unsigned __int128>(hash) * static_cast<uint64_t>(lines);
  return static_cast<int64_t>(product >> 64);
}

void run_threads(int threads, const std::function<void(int)>& work) {
  std::vector<std::thread> others;
  for (int thread = 1; thread < threads; ++thread) others.emplace_back(work, thread);
  work(0);
  for (auto& other : others) other.join();
}

// In a full line a key takes the last slot.
void put(int64_t* line, int64_t key, int64_t value) {
  int slot = 0;
  while (slot < kSlots - 1 && line[kSlots + slot] != 0) ++slot;
  line[slot] = key;
  line[kSlots + slot] = value;
}

}  // namespace

#define PEER_EXPORT __attribute__((visibility("default")))

extern "C" {

// Puts `count` ids with values first_value, first_value + 1, ... and writes the values down in
// order. A thread takes the ids of its range of lines.
PEER_EXPORT void dynemb_peer_insert_limit(int64_t* block, int64_t lines, const int64_t* ids,
                                          int64_t* values, int64_t count, int64_t first_value,
                                          int threads) {
  run_threads(threads, [&](int thread) {
    const int64_t begin = lines * thread / threads;
    const int64_t end = lines * (thread + 1) / threads;
    int64_t own[kOwnIds];
    int64_t own_line[kOwnIds];
    for (int64_t first = 0; first < count; first += kOwnIds) {
      const int64_t last = std::min(count, first + kOwnIds);
      int64_t filled = 0;
      for (int64_t i = first; i < last; ++i) {
        own[filled] = i;
        own_line[filled] = line_of(mixed(ids[i]), lines);
        filled += own_line[filled] >= begin && own_line[filled] < end;
      }
      for (int64_t k = 0; k < filled; ++k) {
        if (k + kLinesAhead < filled) {
          __builtin_prefetch(block + own_line[k + kLinesAhead] * kLineWords, 1);
        }
        put(block + own_line[k] * kLineWords, ids[own[k]], first_value + own[k]);
        values[own[k]] = first_value + own[k];
      }
    }
  });
}

// Reads `old_lines` lines of `old_block` in order and puts what they hold into `new_lines` lines,
// which are zeros, in order too: into the line of its hash, or, where a key does not lie in the
// line of its hash, as far in the new lines as it was in the old ones.
PEER_EXPORT void dynemb_peer_growth_limit(const int64_t* old_block, int64_t old_lines,
                                          int64_t* new_block, int64_t new_lines, int threads) {
  run_threads(threads, [&](int thread) {
    const int64_t end = old_lines * (thread + 1) / threads;
    const double ratio = static_cast<double>(new_lines) / static_cast<double>(old_lines);
    for (int64_t line = old_lines * thread / threads; line < end; ++line) {
      const int64_t* from = old_block + line * kLineWords;
      const int64_t near = static_cast<int64_t>(static_cast<double>(line) * ratio);
      for (int slot = 0; slot < kSlots; ++slot) {
        if (from[kSlots + slot] == 0) continue;
        const uint64_t hash = mixed(from[slot]);
        const int64_t to = line_of(hash, old_lines) == line ? line_of(hash, new_lines) : near;
        put(new_block + to * kLineWords, from[slot], from[kSlots + slot]);
      }
    }
  });
}

}  // extern "C"
