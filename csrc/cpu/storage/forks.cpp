#include "cpu/storage/forks.h"

#include <pthread.h>

#include <atomic>
#include <map>
#include <mutex>
#include <utility>

namespace dynemb::cpu {
namespace {

std::atomic<int64_t> fork_count{0};
// Never freed, so that they can be used during exit.
std::mutex& mutex() {
  static auto* mutex = new std::mutex();
  return *mutex;
}
std::map<int64_t, std::function<void()>>& functions() {
  static auto* map = new std::map<int64_t, std::function<void()>>();
  return *map;
}

// Locked across the fork, so that the child finds a consistent list.
const int forks_are_watched = pthread_atfork([] { mutex().lock(); }, [] { mutex().unlock(); },
                                             [] {
                                               fork_count.fetch_add(1);
                                               for (const auto& entry : functions()) {
                                                 entry.second();
                                               }
                                               functions().clear();
                                               mutex().unlock();
                                             });

}  // namespace

int64_t forks() { return fork_count.load(std::memory_order_relaxed); }

int64_t at_fork(std::function<void()> in_child) {
  static int64_t next = 0;
  const std::lock_guard<std::mutex> lock(mutex());
  functions().emplace(next, std::move(in_child));
  return next++;
}

void forget_fork(int64_t number) {
  const std::lock_guard<std::mutex> lock(mutex());
  functions().erase(number);
}

}  // namespace dynemb::cpu
