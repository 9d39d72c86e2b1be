// Barriers, and functions in which the lanes of a warp exchange values.
#pragma once

#include <cstdint>
#include <cstring>

#include "emulator/types.h"

namespace emulator {

enum Operation : int {
  kSyncThreads,
  kSyncThreadsOr,
  kSyncThreadsAnd,
  kSyncThreadsCount,
  kSyncWarp,
  kShuffle,
  kShuffleXor,
  kShuffleUp,
  kShuffleDown,
  kBallot,
  kAny,
  kAll,
  kMatchAny,
};

// Where a kernel calls such a function: all threads must be at the same place.
struct Site {
  const char* file;
  int line;
  static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
};

// Both return when all threads of the block, or all lanes of the mask, have made the same call.
int block_barrier(Operation operation, int predicate, Site site);
// `source`: the lane of the value that a shuffle returns.
uint64_t warp_exchange(Operation operation, unsigned mask, uint64_t value, int source, Site site);

// Lets other threads run first, now and then, if the order is shuffled.
void interleave();
// A memory fence; it, too, lets other threads run.
void fence();

inline int lane_of_thread() {
  return static_cast<int>(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) %
         warpSize;
}
inline int shuffle_source(Operation operation, int operand, int width) {
  const int lane = lane_of_thread();
  const int first = lane & ~(width - 1);
  const int last = first + width - 1;
  switch (operation) {
    case kShuffle:
      return first + (operand & (width - 1));
    case kShuffleXor:  // an earlier group may be read, a later one not
      return (lane ^ operand) <= last ? lane ^ operand : lane;
    case kShuffleUp:
      return lane - operand >= first ? lane - operand : lane;
    default:
      return lane + operand <= last ? lane + operand : lane;
  }
}
template <class T>
T shuffle(Operation operation, unsigned mask, T value, int operand, int width, Site site) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = warp_exchange(operation, mask, bits, shuffle_source(operation, operand, width), site);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

}  // namespace emulator

#define EMULATOR_SITE emulator::Site site = emulator::Site::here()

inline void __syncthreads(EMULATOR_SITE) {
  emulator::block_barrier(emulator::kSyncThreads, 0, site);
}
inline int __syncthreads_or(int predicate, EMULATOR_SITE) {
  return emulator::block_barrier(emulator::kSyncThreadsOr, predicate, site);
}
inline int __syncthreads_and(int predicate, EMULATOR_SITE) {
  return emulator::block_barrier(emulator::kSyncThreadsAnd, predicate, site);
}
inline int __syncthreads_count(int predicate, EMULATOR_SITE) {
  return emulator::block_barrier(emulator::kSyncThreadsCount, predicate, site);
}
inline void __syncwarp(unsigned mask = 0xffffffffu, EMULATOR_SITE) {
  emulator::warp_exchange(emulator::kSyncWarp, mask, 0, 0, site);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, EMULATOR_SITE) {
  return static_cast<unsigned>(
      emulator::warp_exchange(emulator::kBallot, mask, predicate != 0, 0, site));
}
inline int __any_sync(unsigned mask, int predicate, EMULATOR_SITE) {
  return static_cast<int>(emulator::warp_exchange(emulator::kAny, mask, predicate != 0, 0, site));
}
inline int __all_sync(unsigned mask, int predicate, EMULATOR_SITE) {
  return static_cast<int>(emulator::warp_exchange(emulator::kAll, mask, predicate != 0, 0, site));
}

// The types for which CUDA has these functions, no others.
#define EMULATOR_SHUFFLES(T)                                                                      \
  inline T __shfl_sync(unsigned mask, T value, int source, int width = 32, EMULATOR_SITE) {       \
    return emulator::shuffle(emulator::kShuffle, mask, value, source, width, site);               \
  }                                                                                               \
  inline T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, EMULATOR_SITE) {     \
    return emulator::shuffle(emulator::kShuffleXor, mask, value, bits, width, site);              \
  }                                                                                               \
  inline T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32, EMULATOR_SITE) {   \
    return emulator::shuffle(emulator::kShuffleUp, mask, value, static_cast<int>(by), width,      \
                             site);                                                               \
  }                                                                                               \
  inline T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32, EMULATOR_SITE) { \
    return emulator::shuffle(emulator::kShuffleDown, mask, value, static_cast<int>(by), width,    \
                             site);                                                               \
  }                                                                                               \
  inline unsigned __match_any_sync(unsigned mask, T value, EMULATOR_SITE) {                       \
    uint64_t bits = 0;                                                                            \
    std::memcpy(&bits, &value, sizeof(T));                                                        \
    return static_cast<unsigned>(                                                                 \
        emulator::warp_exchange(emulator::kMatchAny, mask, bits, 0, site));                       \
  }
EMULATOR_SHUFFLES(int)
EMULATOR_SHUFFLES(unsigned)
EMULATOR_SHUFFLES(long)
EMULATOR_SHUFFLES(unsigned long)
EMULATOR_SHUFFLES(long long)
EMULATOR_SHUFFLES(unsigned long long)
EMULATOR_SHUFFLES(float)
EMULATOR_SHUFFLES(double)

#undef EMULATOR_SHUFFLES
#undef EMULATOR_SITE
