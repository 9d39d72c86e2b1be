// What a forked process must not use: it has the memory of its parent, but none of its threads.
#pragma once

#include <cstdint>
#include <functional>

namespace dynemb::cpu {

// How many forks lie between the process that loaded the library and this one.
int64_t forks();

// Registers what a child does right after a fork, before any other code of it runs; returns a
// number for forget_fork(). It may not lock anything but what `at_fork` functions never hold.
int64_t at_fork(std::function<void()> in_child);
void forget_fork(int64_t number);

}  // namespace dynemb::cpu
