// Threads that get no signals: Python's handlers run in the other threads of the process.
#pragma once

#include <signal.h>

#include <cstddef>
#include <system_error>
#include <thread>
#include <vector>

namespace dynemb::cpu {

// Starts threads until there are `count`. Returns 0, or the errno of the first refusal.
template <class Work>
int start_threads(std::vector<std::thread>& threads, size_t count, Work work) {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  int error = 0;
  try {
    while (threads.size() < count) threads.emplace_back(work);
  } catch (const std::system_error& refused) {
    error = refused.code().value();
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return error;
}

}  // namespace dynemb::cpu
