// Memory of the program that is checked, by C++'s memory model.
//
// Each atomic word has a history of its stores. A load may return an older one, unless the thread
// knows a later one: has loaded or made it, or does so a step that happened before. What happened
// before is what clocks of the threads say (threads.h), which acquire and release join.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "threads.h"

namespace interleavings {

struct Store {
  uint64_t value;
  Clock release;                // what a load with acquire learns
  uint32_t seen[kMostThreads];  // when a thread first loaded or made this one or a later one
  bool sequential;
};
struct Word {
  std::vector<Store> stores;
  size_t size;
};

// A plain access.
void access_plain(const void* memory, size_t bytes, bool writes, const void* caller);
void* copy(char* to, const char* from, size_t bytes, const void* caller);
void fence(int order, const void* caller);
void lock(const void* mutex, const void* caller);
void unlock(const void* mutex, const void* caller);

// Steps of atomic accesses, in this order. Another thread may run first.
Word& begin_access(const void* memory, size_t bytes, bool writes, int order);
Store& choose_store(Word& word, int order);
void end_access(const void* memory, size_t bytes, const char* what, uint64_t value, bool writes,
                const void* caller, bool is_old = false);
void see(Store& store, int order);
void append(Word& word, uint64_t value, int order, const Clock& sequence);

template <class T>
T load(T* memory, int order, const void* caller, const char* what = "load") {
  if (!is_running()) return *memory;
  Word& word = begin_access(memory, sizeof(T), false, order);
  Store& store = choose_store(word, order);
  end_access(memory, sizeof(T), what, store.value, false, caller, &store != &word.stores.back());
  see(store, order);
  return static_cast<T>(store.value);
}

template <class T>
void store(T* memory, T value, int order, const void* caller, const char* what = "store") {
  if (is_running()) {
    Word& word = begin_access(memory, sizeof(T), true, order);
    end_access(memory, sizeof(T), what, value, true, caller);
    append(word, value, order, {});
  }
  *memory = value;
}

// Replaces the last value by change(it), and returns it: no other store comes between.
template <class T, class Change>
T modify(T* memory, int order, const void* caller, Change change) {
  if (is_running()) {
    Word& word = begin_access(memory, sizeof(T), true, order);
    end_access(memory, sizeof(T), "modify", change(*memory), true, caller);
    see(word.stores.back(), order);
    append(word, change(*memory), order, Clock(word.stores.back().release));
  }
  const T before = *memory;
  *memory = change(before);
  return before;
}

template <class T>
bool compare_exchange(T* memory, T* expected, T value, int order, int failure, bool weak,
                      const void* caller) {
  if (is_running()) {
    Word& word = begin_access(memory, sizeof(T), true, order);
    Store* seen = &choose_store(word, failure);
    if (seen->value == *expected) seen = &word.stores.back();  // an exchange has the last value
    bool fails = seen->value != *expected;
    if (!fails && weak) fails = choose_old(2, 0.9) != 0;  // for no reason, as a weak one may
    if (fails) {
      end_access(memory, sizeof(T), "no exchange", seen->value, false, caller,
                 seen != &word.stores.back());
      see(*seen, failure);
      *expected = static_cast<T>(seen->value);
      return false;
    }
    end_access(memory, sizeof(T), "exchange", value, true, caller);
    see(word.stores.back(), order);
    append(word, value, order, Clock(word.stores.back().release));
  } else if (*memory != *expected) {
    *expected = *memory;
    return false;
  }
  *memory = value;
  return true;
}

}  // namespace interleavings
