#include "cpu/index/moving_entries.h"

#include <pthread.h>

namespace dynemb::cpu {
namespace {

constexpr uintptr_t kSlots = 1024;
Moves moves[kSlots];

const int forks_are_watched = pthread_atfork(nullptr, nullptr, [] {
  for (Moves& of : moves) of.forget();
});

}  // namespace

Moves& moves_of(const void* memory) {
  return moves[(reinterpret_cast<uintptr_t>(memory) >> 6) % kSlots];
}

}  // namespace dynemb::cpu
