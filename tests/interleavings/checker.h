// Runs threads that share memory in many interleavings, with the values that C++'s memory model
// lets their loads return (tests/README.md, Interleavings).
//
// Programs are compiled with -fsanitize=thread. The calls that the compiler adds before accesses of
// memory are those of hooks.cpp in place of the sanitizer's, so programs have the sources of the
// library as they are.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

namespace interleavings {

// One execution: threads that begin together, and a check after the last one has ended.
struct Execution {
  std::vector<std::function<void()>> threads;  // at most four
  std::function<void()> check;
};

enum class Access {
  kGuarded,  // two accesses of which one is a write must be ordered, or both atomic
  kRacing,   // memcpy reads and writes words of 8 bytes as relaxed atomics do. What it has read is
             // not used before the next fence, release or copy
};

// Marks memory of an execution before its threads begin. Plain accesses to other memory are not
// checked.
void share(const void* memory, size_t bytes, Access access);

// Ends the program with the steps so far unless `holds`.
void require(bool holds, const char* what);

// Runs executions as the arguments of the program say. `make` makes each one anew, with the same
// addresses.
//
//   --random N       N executions by a generator with the seed of --seed; otherwise all with at
//   --preemptions P  most P preemptions and
//   --old V          V loads that return an older value than the last, or late ones
//   --replay 0,1,    one execution by the decisions that a failure has printed
//   --mutant M       with a fault of mutants.py
int explore(int argc, char** argv, const std::function<Execution()>& make);

}  // namespace interleavings
