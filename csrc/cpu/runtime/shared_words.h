// Words that threads share without a lock: whole words, relaxed, with fences between them.
//
// ThreadSanitizer knows no fences. An acquire fence is to it an acquire of each word that this
// thread has loaded before. Where one is missing, it reports accesses to memory beside these words
// that is not atomic.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/runtime/simd.h"

#ifdef __SANITIZE_THREAD__
#include <vector>

extern "C" void __tsan_acquire(void* address);
#endif

namespace dynemb::cpu {

typedef int64_t Words4 __attribute__((vector_size(32)));

#ifdef __SANITIZE_THREAD__
inline thread_local std::vector<const int64_t*> loaded;  // since the last acquire fence
DYNEMB_INLINE void note_load(const int64_t* word) { loaded.push_back(word); }
DYNEMB_INLINE void note_acquire() {
  for (const int64_t* word : loaded) __tsan_acquire(const_cast<int64_t*>(word));
  loaded.clear();
}
#else
DYNEMB_INLINE void note_load(const int64_t*) {}
DYNEMB_INLINE void note_acquire() {}
#endif

DYNEMB_INLINE int64_t load_word(const int64_t* word) {
  note_load(word);
  return __atomic_load_n(word, __ATOMIC_RELAXED);
}
DYNEMB_INLINE int64_t load_word_acquire(const int64_t* word) {
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}
DYNEMB_INLINE void store_word(int64_t* word, int64_t value) {
  __atomic_store_n(word, value, __ATOMIC_RELAXED);
}
DYNEMB_INLINE void store_word_release(int64_t* word, int64_t value) {
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

// Four words, in any order.
DYNEMB_INLINE Words4 load_words(const int64_t* words) {
  Words4 value;
#ifdef __SANITIZE_THREAD__  // a processor loads the words of a vector whole, too
  for (int i = 0; i < 4; ++i) value[i] = load_word(words + i);
#else
  std::memcpy(&value, words, sizeof value);
#endif
  return value;
}

DYNEMB_INLINE void acquire_fence() {
  __atomic_thread_fence(__ATOMIC_ACQUIRE);
  note_acquire();
}
DYNEMB_INLINE void release_fence() { __atomic_thread_fence(__ATOMIC_RELEASE); }

}  // namespace dynemb::cpu
