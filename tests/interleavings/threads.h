// Threads of the program that is checked, all on one thread of the system.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace interleavings {

constexpr int kMostThreads = 4;

// Times of all threads, each the number of its steps.
struct Clock {
  uint32_t at[kMostThreads] = {};
  void join(const Clock& other) {
    for (int t = 0; t < kMostThreads; ++t) at[t] = std::max(at[t], other.at[t]);
  }
};

// A copy of racing memory that a thread has asked for and not made: a processor may load late.
struct LateCopy {
  char* to;  // nullptr: none
  const char* from;
  size_t bytes;
  const void* caller;
};

struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  std::function<void()> run;
  Clock now;
  Clock acquired;  // counts from the next acquire fence on
  Clock released;  // at the last release fence
  LateCopy late;
  const void* waits_for;
  bool ended, yields;
  char exceptions[16];  // of the C++ runtime, which takes all threads for one
};

extern Thread threads[kMostThreads];
extern int thread_count;
extern int current;     // -1 outside of an execution
extern bool profiling;  // in the first executions, which note the words that threads share
inline bool is_running() { return current >= 0; }
inline Thread& self() { return threads[current]; }

// Ends the program, and prints the steps of the execution.
[[noreturn]] void fail(const std::string& what);
// Adds a step of the current thread.
void note(const char* what, const void* address, uint64_t value, const void* caller,
          bool is_old = false);

// Chooses a number below `options`. 0 is the plain one, of that probability in random executions.
int choose(int options, double plain);
// Chooses whether a load returns something else than the last value: 0, or a number below
// `options`. Their number in an execution is bounded.
int choose_old(int options, double plain);

enum class Reason { kStep, kYield, kWaits, kEnded };
// Lets the next thread run: the current one, or another one.
void schedule(Reason reason);
void wait_for(const void* what);
void wake(const void* what);

// Of memory.cpp.
void forget_memory();
void make_late_copy();

}  // namespace interleavings
