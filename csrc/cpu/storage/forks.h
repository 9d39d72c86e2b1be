// Hooks for forked processes, which have the memory of their parent but none of its threads.
#pragma once

#include <cstdint>
#include <functional>

namespace dynemb::cpu {

// Number of forks between the process that loaded the library and this one.
int64_t forks();

// Registers a function that a child runs right after a fork, before any other code; returns a
// number for forget_fork(). It may lock only what `at_fork` functions never hold.
int64_t at_fork(std::function<void()> in_child);
void forget_fork(int64_t number);

}  // namespace dynemb::cpu
