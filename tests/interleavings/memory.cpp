#include "memory.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <unordered_map>

#include "checker.h"

namespace interleavings {
namespace {

// Last times of the accesses of 4 bytes, by thread.
enum Kind { kRead, kWrite, kAtomicRead, kAtomicWrite, kKinds };
struct Accesses {
  uint32_t at[kKinds][kMostThreads] = {};
};
struct Region {
  uintptr_t begin, end;
  Access access;
};
struct Mutex {
  int owner = -1;
  Clock clock;
};
// Threads that read or write a word, as bits.
struct Users {
  unsigned readers, writers;
};

std::unordered_map<uintptr_t, Word> words;
std::unordered_map<uintptr_t, Accesses> accesses;
std::unordered_map<uintptr_t, Users> users;  // in all executions
std::unordered_map<const void*, Mutex> mutexes;
std::vector<Region> regions;

bool acquires(int order) { return order != __ATOMIC_RELAXED && order != __ATOMIC_RELEASE; }
bool releases(int order) { return order >= __ATOMIC_RELEASE; }

uintptr_t number_of(const void* memory) { return reinterpret_cast<uintptr_t>(memory); }

bool is_in(const void* memory, Access access) {
  const uintptr_t address = number_of(memory);
  return std::any_of(regions.begin(), regions.end(), [&](const Region& region) {
    return address >= region.begin && address < region.end && region.access == access;
  });
}

// Fails if an access is not ordered before this one.
void check_race(uintptr_t address, size_t bytes, Kind kind) {
  const auto is_write = [](int of) { return of == kWrite || of == kAtomicWrite; };
  const auto is_atomic = [](int of) { return of >= kAtomicRead; };
  for (uintptr_t part = address & ~uintptr_t{3}; part < address + bytes; part += 4) {
    Accesses& last = accesses[part];
    for (int other = 0; other < kKinds; ++other) {
      if (!is_write(kind) && !is_write(other)) continue;
      if (is_atomic(kind) && is_atomic(other)) continue;
      for (int t = 0; t < thread_count; ++t) {
        if (last.at[other][t] > self().now.at[t]) fail("data race");
      }
    }
    last.at[kind][current] = self().now.at[current];
  }
}

}  // namespace

void share(const void* memory, size_t bytes, Access access) {
  regions.push_back({number_of(memory), number_of(memory) + bytes, access});
}

void forget_memory() {
  words.clear();
  accesses.clear();
  regions.clear();
  mutexes.clear();
}

void access_plain(const void* memory, size_t bytes, bool writes, const void* caller) {
  if (!is_running()) return;
  if (is_in(memory, Access::kRacing)) fail("racing memory is for memcpy alone");
  if (!is_in(memory, Access::kGuarded)) return;
  note(writes ? "plain write" : "plain read", memory, bytes, caller);
  check_race(number_of(memory), bytes, writes ? kWrite : kRead);
  // all other accesses are ordered before or after it, so a history of the word begins anew
  for (size_t byte = 0; writes && byte < bytes; ++byte) words.erase(number_of(memory) + byte);
}

Word& begin_access(const void* memory, size_t bytes, bool writes, int order) {
  if (releases(order)) make_late_copy();
  Users& by = users[number_of(memory)];
  if (profiling) {
    by.readers |= 1u << current;
    if (writes) by.writers |= 1u << current;
  }
  const unsigned conflicting = writes ? by.readers | by.writers : by.writers;
  if (profiling || (conflicting & ~(1u << current)) != 0) schedule(Reason::kStep);
  Word& word = words[number_of(memory)];
  if (word.stores.empty()) {
    uint64_t value = 0;
    std::memmove(&value, memory, bytes);
    word = {{{value, {}, {}, false}}, bytes};
  }
  if (word.size != bytes) fail("atomic accesses of two sizes");
  return word;
}

Store& choose_store(Word& word, int order) {
  const auto is_known = [&](const Store& store) {
    if (store.sequential && order == __ATOMIC_SEQ_CST) return true;
    for (int t = 0; t < thread_count; ++t) {
      if (store.seen[t] <= self().now.at[t]) return true;
    }
    return false;
  };
  const int last = static_cast<int>(word.stores.size()) - 1;
  int oldest = last;
  while (oldest > 0 && !is_known(word.stores[oldest])) --oldest;
  return word.stores[last - choose_old(last - oldest + 1, 0.5)];
}

void end_access(const void* memory, size_t bytes, const char* what, uint64_t value, bool writes,
                const void* caller, bool is_old) {
  note(what, memory, value, caller, is_old);
  if (!is_in(memory, Access::kGuarded)) return;
  check_race(number_of(memory), bytes, writes ? kAtomicWrite : kAtomicRead);
}

void see(Store& store, int order) {
  uint32_t& seen = store.seen[current];
  seen = std::min(seen, self().now.at[current]);
  (acquires(order) ? self().now : self().acquired).join(store.release);
}

void append(Word& word, uint64_t value, int order, const Clock& sequence) {
  Store store{value, sequence, {}, order == __ATOMIC_SEQ_CST};
  store.release.join(releases(order) ? self().now : self().released);
  std::fill(std::begin(store.seen), std::end(store.seen), UINT32_MAX);
  store.seen[current] = self().now.at[current];
  word.stores.push_back(store);
}

void fence(int order, const void* caller) {
  if (!is_running()) return;
  if (order == __ATOMIC_SEQ_CST) fail("sequentially consistent fences are not modelled");
  make_late_copy();
  note("fence", nullptr, static_cast<uint64_t>(order), caller);
  if (acquires(order)) self().now.join(self().acquired);
  if (releases(order)) self().released = self().now;
}

void lock(const void* memory, const void* caller) {
  schedule(Reason::kStep);
  Mutex& mutex = mutexes[memory];
  while (mutex.owner >= 0) wait_for(memory);
  mutex.owner = current;
  note("lock", memory, 0, caller);
  self().now.join(mutex.clock);
}

void unlock(const void* memory, const void* caller) {
  make_late_copy();
  note("unlock", memory, 0, caller);
  mutexes[memory] = {-1, self().now};
  wake(memory);
}

void make_late_copy() {
  const LateCopy late = self().late;
  self().late = {};
  for (size_t byte = 0; byte < late.bytes; byte += 8) {
    auto* from = reinterpret_cast<uint64_t*>(const_cast<char*>(late.from + byte));
    const uint64_t word = load(from, __ATOMIC_RELAXED, late.caller, "racing load");
    std::memmove(late.to + byte, &word, sizeof word);
  }
}

void* copy(char* to, const char* from, size_t bytes, const void* caller) {
  const bool loads = is_running() && is_in(from, Access::kRacing);
  const bool stores = is_running() && is_in(to, Access::kRacing);
  if (is_running()) make_late_copy();
  if (!loads) access_plain(from, bytes, false, caller);
  if (!stores) access_plain(to, bytes, true, caller);
  if ((loads || stores) && bytes % 8 != 0) fail("a copy of racing memory is not of whole words");
  if (loads) {
    if (stores) fail("a copy within racing memory is not modelled");
    self().late = {to, from, bytes, caller};
    if (choose_old(2, 0.7) == 0) make_late_copy();  // otherwise at the next fence or release
  } else if (stores) {
    for (size_t byte = 0; byte < bytes; byte += 8) {
      uint64_t word;
      std::memmove(&word, from + byte, sizeof word);
      store(reinterpret_cast<uint64_t*>(to + byte), word, __ATOMIC_RELAXED, caller, "racing store");
    }
  } else {
    std::memmove(to, from, bytes);
  }
  return to;
}

}  // namespace interleavings
