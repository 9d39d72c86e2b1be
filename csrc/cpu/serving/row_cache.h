// A cache of rows for many threads: sets of 16 rows, of which the least used one makes place.
//
// Uses are counted for each row, and halved in a set after every kTicks lookups there. So rows that
// were popular once leave, and a row that is asked for once does not push out a popular one.
//
// The rows may be those of several files, one after another, in which a key names the same row or
// an older one. begin_file() and replace() lead from one to the next: readers of an earlier file
// find nothing from then on, and put nothing.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>

#include "cpu/runtime/shared_words.h"
#include "cpu/storage/prefetch.h"

namespace dynemb::cpu {

class RowCache {
  static constexpr int kWays = 16;
  struct alignas(64) Set {
    int64_t key[kWays] = {};  // + 1; 0: free. Written under the lock, and read without it
    uint8_t uses[kWays] = {};
    std::atomic<bool> locked = false;
    uint8_t hand = 0;
    uint8_t ticks = 0;
  };

 public:
  // At least one set of rows of `row_bytes`. Keys are numbers from 0 on, which the sets share
  // evenly: a cache of all rows keeps all.
  RowCache(int64_t rows, int64_t row_bytes)
      : row_bytes_(row_bytes),
        sets_(rows > kWays ? (rows + kWays - 1) / kWays : 1),
        set_(new Set[static_cast<size_t>(sets_)]),
        rows_(new char[static_cast<size_t>(sets_ * kWays * row_bytes)]) {}  // taken page by page

  int64_t rows() const { return sets_ * kWays; }
  static int64_t bytes_of(int64_t rows, int64_t row_bytes) {
    return rows * row_bytes + (rows + kWays - 1) / kWays * static_cast<int64_t>(sizeof(Set));
  }

  // A row that is looked for. Some rows go through three stages together, so that their memory is
  // fetched meanwhile.
  struct Search {
    Set* set;
    int64_t key;
  };
  Search begin(int64_t key) const {
    Set* set = set_of(key);
    prefetch_bytes(reinterpret_cast<char*>(set), static_cast<int64_t>(sizeof(Set)));
    return {set, key};
  }
  void fetch_row(Search wanted) const {
    for (int way = 0; way < kWays; ++way) {
      if (load_word(&wanted.set->key[way]) == wanted.key + 1) {
        return prefetch_bytes(row(*wanted.set, way), row_bytes_);
      }
    }
  }
  // Copies the row; false: it is not here, or not for this file.
  bool copy(Search wanted, char* out, int64_t file) {
    Set& set = *wanted.set;
    const int64_t key = wanted.key;
    const Lock lock(set);
    if (file != file_.load(std::memory_order_relaxed)) return false;
    if (++set.ticks >= kTicks) {
      set.ticks = 0;
      for (uint8_t& uses : set.uses) uses = static_cast<uint8_t>(uses / 2);
    }
    for (int way = 0; way < kWays; ++way) {
      if (set.key[way] != key + 1) continue;
      if (set.uses[way] != 255) ++set.uses[way];
      std::memcpy(out, row(set, way), static_cast<size_t>(row_bytes_));
      return true;
    }
    return false;
  }

  void put(int64_t key, const char* from, int64_t file) {
    Set& set = *set_of(key);
    const Lock lock(set);
    if (file != file_.load(std::memory_order_relaxed)) return;
    int victim = -1;
    for (int i = 0; i < kWays; ++i) {  // among equals, the one after the last victim
      const int way = (set.hand + i) % kWays;
      if (set.key[way] == key + 1) return;  // another thread has read it, too
      if (victim < 0 || set.uses[way] < set.uses[victim]) victim = way;
    }
    set.hand = static_cast<uint8_t>((victim + 1) % kWays);
    store_word(&set.key[victim], key + 1);
    set.uses[victim] = 1;
    std::memcpy(row(set, victim), from, static_cast<size_t>(row_bytes_));
  }

  // The rows are those of file number `file` from here on, after replace() of each changed one. The
  // lock of its set comes between that and later calls for the row, which see the number.
  void begin_file(int64_t file) { file_.store(file, std::memory_order_relaxed); }
  void replace(int64_t key, const char* from, int64_t file) {
    {
      Set& set = *set_of(key);
      const Lock lock(set);
      for (int way = 0; way < kWays; ++way) {
        if (set.key[way] == key + 1) store_word(&set.key[way], 0), set.uses[way] = 0;
      }
    }
    put(key, from, file);
  }

 private:
  static constexpr uint8_t kTicks = 10 * kWays;

  class Lock {
   public:
    explicit Lock(Set& set) : set_(set) {
      while (set_.locked.exchange(true, std::memory_order_acquire)) {
        while (set_.locked.load(std::memory_order_relaxed)) std::this_thread::yield();
      }
    }
    ~Lock() { set_.locked.store(false, std::memory_order_release); }
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;

   private:
    Set& set_;
  };

  Set* set_of(int64_t key) const {
    return &set_[static_cast<size_t>(key) % static_cast<size_t>(sets_)];
  }
  char* row(const Set& set, int way) const {
    return &rows_[static_cast<size_t>(((&set - set_.get()) * kWays + way) * row_bytes_)];
  }

  const int64_t row_bytes_, sets_;
  std::atomic<int64_t> file_ = 0;
  const std::unique_ptr<Set[]> set_;
  const std::unique_ptr<char[]> rows_;
};

}  // namespace dynemb::cpu
