// What ThreadSanitizer hears of the order of CUDA threads. This file itself is not sanitized.
#if defined(EMULATOR_RACES)
#include "order.h"

#include <sanitizer/tsan_interface.h>

#include <cstdint>
#include <cstdlib>
#include <vector>

#include "emulator/order.h"

extern "C" {  // of the sanitizer, for Java's garbage collector: memory that begins anew
void __tsan_java_init(unsigned long heap, unsigned long bytes);
void __tsan_java_alloc(unsigned long memory, unsigned long bytes);
void __tsan_java_free(unsigned long memory, unsigned long bytes);
}

namespace emulator {
namespace {

constexpr int kMaxThreads = 1024;
constexpr int kReads = 64;          // that a thread remembers until its next fence
constexpr size_t kMeetings = 4096;  // that one piece of memory has room for

struct ThreadOrder {
  void* fence;  // a thread that has seen what this one had at its last fence
  const volatile void* reads[kReads];
  int read_count;
};
ThreadOrder threads[kMaxThreads];

// ThreadSanitizer keeps what was released at an address until the memory is freed.
struct Grid {
  char begin[8];
  char end[8];
};
Grid* grid;
void* host;                   // the thread that has launched
std::vector<char*> meetings;  // pieces of the block
size_t next_meeting;

}  // namespace

void begin_grid_order() {
  grid = static_cast<Grid*>(std::malloc(sizeof(Grid)));
  host = __tsan_get_current_fiber();
  __tsan_release(grid->begin);
}
void end_grid_order() {
  __tsan_acquire(grid->end);
  std::free(grid);
}

void begin_block_order(void* shared, size_t bytes) {
  for (char* piece : meetings) std::free(piece);
  meetings.clear();
  next_meeting = kMeetings;
  const auto memory = reinterpret_cast<unsigned long>(shared);
  static const bool once =
      (__tsan_java_init(memory, bytes), __tsan_java_alloc(memory, bytes), true);
  static_cast<void>(once);
  __tsan_java_free(memory, bytes);
  __tsan_java_alloc(memory, bytes);
}

void begin_thread_order() {
  __tsan_acquire(grid->begin);
  threads[running_thread()] = {};
}
void end_thread_order() {
  __tsan_release(grid->end);
  void* fence = threads[running_thread()].fence;
  if (fence != nullptr) __tsan_destroy_fiber(fence);
}

void fence_order() {
  ThreadOrder& self = threads[running_thread()];
  for (int i = 0; i < self.read_count; ++i) __tsan_acquire(const_cast<void*>(self.reads[i]));
  self.read_count = 0;
  if (self.fence != nullptr) __tsan_destroy_fiber(self.fence);
  self.fence = __tsan_create_fiber(0);  // a new thread has seen what its creator has
}

char* new_meeting() {
  if (next_meeting == kMeetings) {
    next_meeting = 0;
    void* self = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(host, __tsan_switch_to_fiber_no_sync);  // which frees the memory
    meetings.push_back(static_cast<char*>(std::malloc(kMeetings * 8)));
    __tsan_switch_to_fiber(self, __tsan_switch_to_fiber_no_sync);
  }
  return meetings.back() + 8 * next_meeting++;
}
void arrive(char* meeting) {
  if (meeting != nullptr) __tsan_release(meeting);
}
void leave(char* meeting) {
  if (meeting != nullptr) __tsan_acquire(meeting);
}

void order_before_write(const volatile void* address) {
  if (running_thread() < 0) return;
  void* fence = threads[running_thread()].fence;
  if (fence == nullptr) return;
  void* self = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(fence, __tsan_switch_to_fiber_no_sync);
  __tsan_release(const_cast<void*>(address));
  __tsan_switch_to_fiber(self, __tsan_switch_to_fiber_no_sync);
}
void order_after_read(const volatile void* address) {
  if (running_thread() < 0) return;
  ThreadOrder& self = threads[running_thread()];
  for (int i = 0; i < self.read_count; ++i) {
    if (self.reads[i] == address) return;
  }
  self.reads[self.read_count++ % kReads] = address;
  if (self.read_count > kReads) self.read_count = kReads;
}

}  // namespace emulator

// Called before each volatile access of sanitized code.
#define EMULATOR_VOLATILE(bytes, bits)                                                          \
  extern "C" int##bits##_t __tsan_atomic##bits##_load(const volatile void*, int);               \
  extern "C" int##bits##_t __tsan_atomic##bits##_fetch_add(volatile void*, int##bits##_t, int); \
  extern "C" void __tsan_volatile_read##bytes(void* address) {                                  \
    __tsan_atomic##bits##_load(address, __ATOMIC_RELAXED);                                      \
    emulator::order_after_read(address);                                                        \
  }                                                                                             \
  extern "C" void __tsan_volatile_write##bytes(void* address) {                                 \
    emulator::order_before_write(address);                                                      \
    __tsan_atomic##bits##_fetch_add(address, 0, __ATOMIC_RELAXED);                              \
  }
EMULATOR_VOLATILE(1, 8)
EMULATOR_VOLATILE(2, 16)
EMULATOR_VOLATILE(4, 32)
EMULATOR_VOLATILE(8, 64)
#endif
