// Threads of a kernel as fibers on one host thread.
//
// A fiber runs thread after thread; only a thread that waits keeps its fiber, and the next thread
// then runs on another one. So threads that never wait cost a function call each. In the build for
// races every thread has a fiber of its own.
#if defined(EMULATOR_BOUNDS)
#include <sanitizer/asan_interface.h>
#endif

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <numeric>
#include <utility>
#include <vector>

#include "emulator/fibers.h"
#include "emulator/launch.h"
#include "emulator/synchronization.h"
#include "order.h"

uint3 threadIdx;
uint3 blockIdx;
dim3 blockDim;
dim3 gridDim;

// By the linker: the section of shared memory. The word is there also without another one.
extern "C" {
extern char __start_emulated_shared[] __attribute__((visibility("hidden")));
extern char __stop_emulated_shared[] __attribute__((visibility("hidden")));
}

namespace emulator {
namespace {

alignas(8) __attribute__((section("emulated_shared"), used)) uint64_t first_shared_word;

constexpr int kMaxThreads = 1024;
constexpr uint64_t kGarbage = 0xdeaddeaddeaddeadULL;

const char* const kNames[] = {"__syncthreads",       "__syncthreads_or", "__syncthreads_and",
                              "__syncthreads_count", "__syncwarp",       "__shfl_sync",
                              "__shfl_xor_sync",     "__shfl_up_sync",   "__shfl_down_sync",
                              "__ballot_sync",       "__any_sync",       "__all_sync",
                              "__match_any_sync"};

struct Thread {
  Fiber* fiber;  // nullptr before it starts and after it ends
  uint3 index;
  bool waiting;
  Operation operation;
  Site site;
  unsigned mask;
  uint64_t value;
  int source;
  uint64_t result;
  char* meeting;  // of the call in which it waits, if that orders memory
};

// Lanes that wait for each other.
struct Group {
  unsigned mask;
  unsigned arrived;
  Operation operation;
  Site site;
  char* meeting;
};

// The one launch that runs; guarded by `launching`.
std::mutex launching;
void (*body)(void*);
void* body_context;
bool in_kernel = false;
int thread_count;
int current;  // thread
Thread threads[kMaxThreads];
int start_order[kMaxThreads];
int started;
int finished;
int ready[kMaxThreads];  // a ring
int ready_first;
int ready_count;
std::vector<Group> groups[kMaxThreads / warpSize];
Group barrier;
int barrier_arrived;
uint64_t barrier_true;

#if defined(EMULATOR_RACES)
// Fibers in turn, so many that neighbouring blocks have different ones.
constexpr bool kReuse = false;
constexpr size_t kFibers = kMaxThreads + 256;
size_t turn = 0;
#else
constexpr bool kReuse = true;
#endif
std::vector<Fiber*> free_fibers;
Fiber launcher;

unsigned char fill = 0xa5;  // of shared memory, before each block

bool shuffled = false;
uint64_t random_state;
long long launches = 0;

uint64_t random_word() {  // splitmix64
  random_state += 0x9e3779b97f4a7c15ULL;
  uint64_t z = random_state;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}
int random_below(int count) {
  return static_cast<int>(((random_word() >> 32) * static_cast<uint64_t>(count)) >> 32);
}
template <class T>
void shuffle_order(T* order, int64_t count) {
  for (int64_t i = count; i > 1; --i) {
    std::swap(order[i - 1], order[random_word() % static_cast<uint64_t>(i)]);
  }
}

[[noreturn]] void stop() {
  std::fflush(stderr);
  std::abort();
}
void print_place(const char* what) {
  std::fprintf(stderr, "emulator: block (%u, %u, %u) of (%u, %u, %u): %s\n", blockIdx.x, blockIdx.y,
               blockIdx.z, gridDim.x, gridDim.y, gridDim.z, what);
}
void print_thread(int number) {
  const Thread& thread = threads[number];
  std::fprintf(stderr, "  thread (%u, %u, %u), lane %d: ", thread.index.x, thread.index.y,
               thread.index.z, number % warpSize);
  if (!thread.waiting) {
    std::fprintf(stderr, "%s\n", thread.fiber == nullptr ? "has ended" : "runs");
    return;
  }
  std::fprintf(stderr, "in %s", kNames[thread.operation]);
  if (thread.operation >= kSyncWarp) std::fprintf(stderr, " with mask %#x", thread.mask);
  std::fprintf(stderr, " at %s:%d\n", thread.site.file, thread.site.line);
}

bool same_site(Site a, Site b) {
  return a.line == b.line && (a.file == b.file || std::strcmp(a.file, b.file) == 0);
}

[[noreturn]] void stop_at_deadlock() {
  print_place("deadlock, these threads wait for threads that have ended or wait elsewhere:");
  constexpr int kShown = 8;
  int shown = 0;
  const Thread* last = nullptr;
  for (int t = 0; t < thread_count && shown < kShown; ++t) {
    const Thread& thread = threads[t];
    if (last != nullptr && last->waiting == thread.waiting &&
        (!thread.waiting || (last->operation == thread.operation && last->mask == thread.mask &&
                             same_site(last->site, thread.site)))) {
      continue;  // as the thread before
    }
    last = &thread;
    print_thread(t);
    ++shown;
  }
  std::fprintf(stderr, "  %d of %d threads have ended\n", finished, thread_count);
  stop();
}

void make_ready(int thread) {
  threads[thread].waiting = false;
  ready[(ready_first + ready_count++) % kMaxThreads] = thread;
}

// The thread to run next, -1 if there is none: threads that can go on come before those that have
// not started, unless the order is shuffled.
int next_thread() {
  const bool can_start = started < thread_count;
  if (ready_count > 0 && (!can_start || !shuffled || (random_word() >> 63) != 0)) {
    if (shuffled) {
      std::swap(ready[ready_first], ready[(ready_first + random_below(ready_count)) % kMaxThreads]);
    }
    const int thread = ready[ready_first];
    ready_first = (ready_first + 1) % kMaxThreads;
    --ready_count;
    return thread;
  }
  return can_start ? start_order[started++] : -1;
}

uint3 index_of_thread(int thread) {
  const auto t = static_cast<unsigned>(thread);
  if (t < blockDim.x) return {t, 0, 0};
  return {t % blockDim.x, t / blockDim.x % blockDim.y, t / blockDim.x / blockDim.y};
}

void run_threads_on(Fiber* self) noexcept;

// The fiber on which `thread` goes on or starts.
Fiber* fiber_of(int thread) {
  if (threads[thread].fiber != nullptr) return threads[thread].fiber;
#if defined(EMULATOR_RACES)
  Fiber* fiber = free_fibers[turn++ % kFibers];
#else
  Fiber* fiber;
  if (free_fibers.empty()) {
    fiber = create_fiber(run_threads_on);
  } else {
    fiber = free_fibers.back();
    free_fibers.pop_back();
  }
#endif
  fiber->thread = thread;
  return fiber;
}

// noexcept: nothing could catch an exception below this frame.
void run_threads_on(Fiber* self) noexcept {
  for (;;) {
    Thread& thread = threads[self->thread];
    thread.fiber = self;
    thread.index = index_of_thread(self->thread);
    threadIdx = thread.index;
    current = self->thread;
    begin_thread_order();
    body(body_context);
    end_thread_order();
    thread.fiber = nullptr;
    ++finished;
    const int next = next_thread();
    if (kReuse && next >= 0 && threads[next].fiber == nullptr) {
      self->thread = next;
      continue;
    }
    if (kReuse) free_fibers.push_back(self);
    if (next < 0 && finished < thread_count) stop_at_deadlock();
    switch_fiber(*self, next < 0 ? launcher : *fiber_of(next));
  }
}

// Runs other threads until this one is taken from the ready ones.
void suspend() {
  const int self = current;
  const int next = next_thread();
  if (next < 0) stop_at_deadlock();
  if (next == self) return;
  switch_fiber(*threads[self].fiber, *fiber_of(next));
  threadIdx = threads[self].index;
  current = self;
}

void check_in_kernel(Operation operation) {
  if (in_kernel) return;
  std::fprintf(stderr, "emulator: %s outside a kernel\n", kNames[operation]);
  stop();
}

void begin_wait(Operation operation, unsigned mask, uint64_t value, int source, Site site) {
  Thread& self = threads[current];
  self.waiting = true;
  self.operation = operation;
  self.site = site;
  self.mask = mask;
  self.value = value;
  self.source = source;
}

// All that wait for each other must have made one call.
void check_same_call(const Group& group, int other) {
  const Thread& self = threads[current];
  if (group.operation == self.operation && same_site(group.site, self.site)) return;
  print_place("threads that should make one call make different ones:");
  print_thread(current);
  print_thread(other);
  stop();
}

void finish_exchange(const Group& group, int first_thread) {
  Thread* lane = threads + first_thread;
  unsigned ballot = 0;
  for (int i = 0; i < warpSize; ++i) {
    if ((group.mask >> i & 1u) != 0 && lane[i].value != 0) ballot |= 1u << i;
  }
  for (int i = 0; i < warpSize; ++i) {
    if ((group.mask >> i & 1u) == 0) continue;
    uint64_t result = 0;
    switch (group.operation) {
      case kShuffle:
      case kShuffleXor:
      case kShuffleUp:
      case kShuffleDown:
        result = (group.mask >> lane[i].source & 1u) != 0 ? lane[lane[i].source].value : kGarbage;
        break;
      case kBallot:
        result = ballot;
        break;
      case kAny:
        result = ballot != 0;
        break;
      case kAll:
        result = ballot == group.mask;
        break;
      case kMatchAny:
        for (int j = 0; j < warpSize; ++j) {
          if ((group.mask >> j & 1u) != 0 && lane[j].value == lane[i].value) result |= 1u << j;
        }
        break;
      default:
        break;
    }
    lane[i].result = result;
  }
}

// Statically allocated by the linker, of all kernels; volatile, because a call of memset would be
// checked.
void fill_shared_memory() {
  for (volatile char* byte = __start_emulated_shared; byte != __stop_emulated_shared; ++byte) {
    *byte = static_cast<char>(fill);
  }
}

void run_block() {
  fill_shared_memory();
  begin_block_order(__start_emulated_shared,
                    static_cast<size_t>(__stop_emulated_shared - __start_emulated_shared));
  started = 0;
  finished = 0;
  if (shuffled) shuffle_order(start_order, thread_count);
  switch_fiber(launcher, *fiber_of(next_thread()));
}

}  // namespace

int mutant = 0;

#if defined(EMULATOR_BOUNDS)
void forbid(char* begin, char* end) {
  __asan_poison_memory_region(begin, static_cast<size_t>(end - begin));
}
#endif

void run_threads(dim3 grid, dim3 block, void (*thread_body)(void*), void* context) {
  const uint64_t block_threads = uint64_t{block.x} * block.y * block.z;
  const uint64_t blocks = uint64_t{grid.x} * grid.y * grid.z;
  if (block_threads == 0 || block_threads > kMaxThreads || blocks == 0 || blocks > INT32_MAX) {
    std::fprintf(stderr, "emulator: a launch of %llu blocks of %llu threads\n",
                 static_cast<unsigned long long>(blocks),
                 static_cast<unsigned long long>(block_threads));
    stop();
  }
  const std::lock_guard<std::mutex> lock(launching);
  ++launches;
  body = thread_body;
  body_context = context;
  thread_count = static_cast<int>(block_threads);
  gridDim = grid;
  blockDim = block;
  std::iota(start_order, start_order + thread_count, 0);
  std::vector<int> block_order;
  if (shuffled) {
    block_order.resize(blocks);
    std::iota(block_order.begin(), block_order.end(), 0);
    shuffle_order(block_order.data(), static_cast<int64_t>(blocks));
  }
  adopt_thread(launcher);
#if defined(EMULATOR_RACES)
  while (free_fibers.size() < kFibers) free_fibers.push_back(create_fiber(run_threads_on));
  for (std::vector<Group>& waiting : groups) waiting.reserve(warpSize);
#endif
  begin_grid_order();
  in_kernel = true;
  for (uint64_t i = 0; i < blocks; ++i) {
    const auto b = static_cast<unsigned>(shuffled ? block_order[i] : static_cast<int>(i));
    blockIdx = {b % grid.x, b / grid.x % grid.y, b / grid.x / grid.y};
    run_block();
  }
  in_kernel = false;
  end_grid_order();
}

int running_thread() { return in_kernel ? current : -1; }

int block_barrier(Operation operation, int predicate, Site site) {
  check_in_kernel(operation);
  begin_wait(operation, 0, 0, 0, site);
  if (barrier_arrived == 0) {
    barrier = {0, 0, operation, site, new_meeting()};
    barrier_true = 0;
  } else {
    int other = 0;
    while (other == current || !threads[other].waiting || threads[other].operation >= kSyncWarp) {
      ++other;
    }
    check_same_call(barrier, other);
  }
  threads[current].meeting = barrier.meeting;
  arrive(barrier.meeting);
  barrier_true += predicate != 0 ? 1 : 0;
  if (++barrier_arrived == thread_count) {
    uint64_t result = barrier_true;
    if (operation == kSyncThreadsOr) result = barrier_true != 0;
    if (operation == kSyncThreadsAnd) result = barrier_true == static_cast<uint64_t>(thread_count);
    barrier_arrived = 0;
    for (int t = 0; t < thread_count; ++t) {
      threads[t].result = result;
      make_ready(t);
    }
  }
  suspend();
  leave(threads[current].meeting);
  return static_cast<int>(threads[current].result);
}

uint64_t warp_exchange(Operation operation, unsigned mask, uint64_t value, int source, Site site) {
  check_in_kernel(operation);
  const int lane = current % warpSize;
  const int first_thread = current - lane;
  begin_wait(operation, mask, value, source, site);
  if ((mask >> lane & 1u) == 0) {
    print_place("a lane is not in the mask of its own call:");
    print_thread(current);
    stop();
  }
  std::vector<Group>& waiting = groups[current / warpSize];
  size_t g = 0;
  while (g < waiting.size() && waiting[g].mask != mask) ++g;
  if (g == waiting.size()) {
    waiting.push_back({mask, 0, operation, site, operation == kSyncWarp ? new_meeting() : nullptr});
  } else {
    check_same_call(waiting[g], first_thread + __builtin_ctz(waiting[g].arrived));
  }
  threads[current].meeting = waiting[g].meeting;
  arrive(waiting[g].meeting);
  waiting[g].arrived |= 1u << lane;
  if (waiting[g].arrived == mask) {
    finish_exchange(waiting[g], first_thread);
    waiting[g] = waiting.back();
    waiting.pop_back();
    for (int i = 0; i < warpSize; ++i) {
      if ((mask >> i & 1u) != 0) make_ready(first_thread + i);
    }
  }
  suspend();
  leave(threads[current].meeting);
  return threads[current].result;
}

void fence() {
  if (in_kernel) fence_order();
  interleave();
}

void interleave() {
  if (!shuffled || !in_kernel || random_word() % 4 != 0) return;
  make_ready(current);
  suspend();
}

}  // namespace emulator

extern "C" void emulator_set_seed(unsigned long long seed) {
  const std::lock_guard<std::mutex> lock(emulator::launching);
  emulator::shuffled = seed != 0;
  emulator::random_state = seed;
}

extern "C" void emulator_set_mutant(int number) { emulator::mutant = number; }

extern "C" void emulator_set_fill(int byte) {
  const std::lock_guard<std::mutex> lock(emulator::launching);
  emulator::fill = static_cast<unsigned char>(byte);
}

extern "C" long long emulator_launches() {
  const std::lock_guard<std::mutex> lock(emulator::launching);
  return emulator::launches;
}

// Read by the sanitizer. An abort lets Python say which test it was; an exit would be silent.
extern "C" __attribute__((visibility("default"))) const char* __ubsan_default_options() {
  return "abort_on_error=1:print_stacktrace=1";
}
