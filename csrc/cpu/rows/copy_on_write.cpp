#include "cpu/rows/copy_on_write.h"

#include <chrono>
#include <cstring>
#include <thread>

namespace dynemb::cpu {
namespace {

// The reader takes some microseconds to the next row, after which a place may be free.
constexpr std::chrono::microseconds kWait{50};

int32_t* mark_of(const SlabState& state, int64_t row) {
  return reinterpret_cast<int32_t*>(state.copy_on_write + state.copy_on_write[kCowMarks]) + row;
}

// Damaged fields give no place outside the vector.
char* place_of(const SlabState& state, int64_t place) {
  return reinterpret_cast<char*>(state.copy_on_write + state.copy_on_write[kCowBuffer]) +
         place % state.copy_on_write[kCowPlaces] * state.copy_on_write[kCowRowBytes];
}

int32_t* free_place(const SlabState& state, int64_t number) {
  return reinterpret_cast<int32_t*>(state.copy_on_write + state.copy_on_write[kCowFree]) +
         static_cast<uint64_t>(number) % static_cast<uint64_t>(state.copy_on_write[kCowPlaces]);
}

// A free place, or -1. Its entry of the ring is not written before the place is freed.
int64_t taken_place(const SlabState& state) {
  int64_t number = __atomic_load_n(state.copy_on_write + kCowTaken, __ATOMIC_RELAXED);
  while (number < __atomic_load_n(state.copy_on_write + kCowGiven, __ATOMIC_ACQUIRE)) {
    if (__atomic_compare_exchange_n(state.copy_on_write + kCowTaken, &number, number + 1, true,
                                    __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) {
      return *free_place(state, number) & INT32_MAX;
    }
  }
  return -1;
}

// Only one thread reads rows.
void give_place(const SlabState& state, int32_t place) {
  const int64_t number = state.copy_on_write[kCowGiven];
  *free_place(state, number) = place;
  __atomic_store_n(state.copy_on_write + kCowGiven, number + 1, __ATOMIC_RELEASE);
}

// Calls copy(bytes of the row, size) for each tensor of a row.
template <class Copy>
void each_part(const SlabState& state, int64_t row, Copy copy) {
  for (int k = 0; k < state.element_states; ++k) {
    copy(state.element[k] + row * state.row_bytes[k], state.row_bytes[k]);
  }
  for (int k = 0; k < state.row_states; ++k) {
    copy(reinterpret_cast<char*>(state.of_row[k] + row), int64_t{sizeof(float)});
  }
  if (state.steps != nullptr) {
    copy(reinterpret_cast<char*>(state.steps + row), int64_t{sizeof(int32_t)});
  }
}

}  // namespace

void copy_before_write(const SlabState& state, int64_t row, const char* weights,
                       int64_t weight_bytes) {
  if (row >= state.copy_on_write[kCowRows]) return;
  int32_t* mark = mark_of(state, row);
  while (copies_on_write(state)) {
    int32_t seen = __atomic_load_n(mark, __ATOMIC_ACQUIRE);
    if (seen == kCowRead || seen > 0) return;
    if (seen == kCowCopying || !__atomic_compare_exchange_n(mark, &seen, kCowCopying, false,
                                                            __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) {
      std::this_thread::yield();
      continue;
    }
    const int64_t place = taken_place(state);
    if (place < 0) {
      __atomic_store_n(mark, kCowUnread, __ATOMIC_RELEASE);
      __atomic_fetch_add(state.copy_on_write + kCowWaits, 1, __ATOMIC_RELAXED);
      std::this_thread::sleep_for(kWait);
      continue;
    }
    char* to = place_of(state, place);
    std::memcpy(to, weights, static_cast<size_t>(weight_bytes));
    to += weight_bytes;
    each_part(state, row, [&to](const char* from, int64_t bytes) {
      std::memcpy(to, from, static_cast<size_t>(bytes));
      to += bytes;
    });
    __atomic_store_n(mark, static_cast<int32_t>(place + 1), __ATOMIC_RELEASE);
    return;
  }
}

void take_row(const SlabState& state, int64_t row, const char* weights, int64_t weight_bytes,
              const SlabState& to, int64_t to_row, char* to_weights) {
  const auto copy_from = [&](const char* from_weights, auto next) {
    std::memcpy(to_weights, from_weights, static_cast<size_t>(weight_bytes));
    each_part(to, to_row, [&](char* target, int64_t bytes) {
      std::memcpy(target, next(bytes), static_cast<size_t>(bytes));
    });
  };
  {
    const char* parts[2 * kMaxStates + 1];
    int part = 0;
    each_part(state, row, [&](const char* from, int64_t) { parts[part++] = from; });
    part = 0;
    copy_from(weights, [&](int64_t) { return parts[part++]; });
  }
  int32_t* mark = mark_of(state, row);
  while (true) {
    int32_t seen = kCowUnread;
    if (__atomic_compare_exchange_n(mark, &seen, kCowRead, false, __ATOMIC_ACQ_REL,
                                    __ATOMIC_ACQUIRE) ||
        seen == kCowRead) {
      return;
    }
    if (seen > 0) {
      const char* from = place_of(state, seen - 1);
      const char* at = from + weight_bytes;
      copy_from(from, [&at](int64_t bytes) {
        const char* here = at;
        at += bytes;
        return here;
      });
      __atomic_store_n(mark, kCowRead, __ATOMIC_RELEASE);
      give_place(state, seen - 1);
      return;
    }
    std::this_thread::yield();  // a writer is copying the row
  }
}

}  // namespace dynemb::cpu
