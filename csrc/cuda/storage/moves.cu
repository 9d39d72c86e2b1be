#include "cuda/runtime/device.cuh"
#include "cuda/storage/moves.h"

namespace dynemb::cuda {
namespace {

constexpr int64_t kWarp = 32;

struct MoveJob {
  CacheView cache;
  const HomePlan* plan;
  const StagedMove* moves;
  int64_t row_bytes;  // of all tensors
};

// Writes a slot to one home and reads it from another, so that both directions of the link are
// used. nullptr: nothing moves that way.
template <class T>
__device__ __forceinline__ void exchange(char* slot, char* to, const char* from, int64_t bytes,
                                         int64_t lane) {
  auto* row = reinterpret_cast<T*>(slot);
  for (int64_t i = lane; i < bytes / static_cast<int64_t>(sizeof(T)); i += kWarp) {
    T incoming{};
    if (from != nullptr) incoming = reinterpret_cast<const T*>(from)[i];
    if (to != nullptr) reinterpret_cast<T*>(to)[i] = row[i];
    if (from != nullptr) row[i] = incoming;
  }
}

__device__ __forceinline__ void exchange_rows(const MovedTensor& tensor, int64_t slot, int64_t to,
                                              int64_t from, int64_t lane) {
  const int64_t bytes = tensor.row_bytes;
  char* row = tensor.data + slot * bytes;
  char* target = to < 0 ? nullptr : tensor.data + to * bytes;
  const char* source = from < 0 ? nullptr : tensor.data + from * bytes;
  switch (tensor.unit) {
    case 16:
      return exchange<uint4>(row, target, source, bytes, lane);
    case 8:
      return exchange<uint2>(row, target, source, bytes, lane);
    case 4:
      return exchange<uint32_t>(row, target, source, bytes, lane);
    case 2:
      return exchange<uint16_t>(row, target, source, bytes, lane);
    default:
      return exchange<uint8_t>(row, target, source, bytes, lane);
  }
}

__device__ __forceinline__ void add_to(int64_t* counter, int64_t more) {
  atomicAdd(reinterpret_cast<unsigned long long*>(counter), static_cast<unsigned long long>(more));
}

// The dirty bits of a slot go to the home of the row that leaves it.
__device__ __forceinline__ void move_dirty_bits(const CacheView& cache, const StagedMove& move,
                                                int64_t old_home) {
  uint8_t* of_slot = cache.dirty_bits + move.slot;
  if (move.owner > 0 && *of_slot != 0) cache.dirty_bits[old_home] |= *of_slot;
  *of_slot = 0;
}

__device__ __forceinline__ void count_bytes(const MoveJob& job, bool saves, bool loads) {
  int64_t* head = job.cache.head;
  if (saves) add_to(head + kTierWrittenBytes, job.row_bytes);
  if (loads) add_to(head + kTierLoaded, 1);
  if (loads) add_to(head + kTierLoadedBytes, job.row_bytes);
}

// A warp per move, strided: the bytes of a row each way, fewer if one of the rows is unwritten or
// unchanged.
__global__ void move_staged(const __grid_constant__ MoveJob job) {
  const CacheView& cache = job.cache;
  const int64_t given = job.plan->given;
  const int64_t lane = thread_number() % kWarp;
  for (int64_t m = thread_number() / kWarp; m < given; m += thread_total() / kWarp) {
    const StagedMove move = job.moves[m];
    const int64_t old_home = home_of(cache.most_slots, handle_row(move.owner - 1));
    const int64_t new_home = home_of(cache.most_slots, handle_row(move.handle));
    const bool written =
        move.owner > 0 && cache.generations[move.slot] == slot_generation(move.marks);
    const bool saves = written && slot_is_dirty(move.marks);
    const bool loads = cache.generations[new_home] == handle_generation(move.handle);
    __syncwarp();  // all lanes have read the generations
    if (saves || loads) {
      for (int t = 0; t < cache.moved_count; ++t) {
        exchange_rows(cache.moved[t], move.slot, saves ? old_home : -1, loads ? new_home : -1,
                      lane);
      }
    }
    if (lane == 0) {
      if (move.owner > 0) {
        cache.generations[old_home] = returned_generation(move.owner - 1, written);
      }
      cache.generations[new_home] = left_generation(move.handle);
      if (cache.dirty_bits != nullptr) move_dirty_bits(cache, move, old_home);
      if (loads) {
        cache.generations[move.slot] =
            static_cast<int32_t>(next_generation(slot_generation(move.marks)));
      }
    }
    count_by_key(lane == 0 && saves, kTierWritten, cache.clock);
    if (lane == 0 && (saves || loads)) count_bytes(job, saves, loads);
  }
}

}  // namespace

void move_rows(const Call& call, const CacheView& cache, const HomePlan* plan,
               const StagedMove* moves, int64_t most) {
  int64_t row_bytes = 0;
  for (int t = 0; t < cache.moved_count; ++t) row_bytes += cache.moved[t].row_bytes;
  call.launch_strided(move_staged, most * kWarp, MoveJob{cache, plan, moves, row_bytes});
}

}  // namespace dynemb::cuda
