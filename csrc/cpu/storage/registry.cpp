#include "cpu/storage/registry.h"

#include <pthread.h>

#include <map>
#include <mutex>
#include <utility>

#include "arguments/storage.h"
#include "core/runtime/check.h"

namespace dynemb::cpu {
namespace {

// Never freed: Python frees objects at exit that still need them.
std::mutex& mutex() {
  static auto* mutex = new std::mutex();
  return *mutex;
}
std::map<const void*, std::shared_ptr<RegisteredStore>>& stores() {
  static auto* map = new std::map<const void*, std::shared_ptr<RegisteredStore>>();
  return *map;
}

// A forked child must not find it locked forever.
const int forks_are_watched =
    pthread_atfork([] { mutex().lock(); }, [] { mutex().unlock(); }, [] { mutex().unlock(); });

}  // namespace

TensorPlace place_of(const Tensor& tensor) {
  TensorPlace place{tensor.data_ptr(), {}};
  for (int64_t i = 0; i < tensor.dim(); ++i) place.size.push_back(tensor.size(i));
  return place;
}

void register_store(const char* op, const Tensor& tier_clock, RegisteredStore store) {
  const std::lock_guard<std::mutex> lock(mutex());
  const bool is_new =
      stores()
          .emplace(tier_clock.data_ptr(), std::make_shared<RegisteredStore>(std::move(store)))
          .second;
  DYNEMB_CHECK(is_new, "dynemb::", op,
               ": tier_clock has a store already: close it first, with store_close");
}

std::shared_ptr<RegisteredStore> registered_store(const char* op, const Tensor& tier_clock) {
  check_tier_clock(op, tier_clock);
  const std::lock_guard<std::mutex> lock(mutex());
  const auto found = stores().find(tier_clock.data_ptr());
  DYNEMB_CHECK(found != stores().end(), "dynemb::", op,
               ": tier_clock at this address has no store: it is a copy, or its store was "
               "closed. Pass the tensor that store_open was given, not a clone of it");
  return found->second;
}

RowStore* store_of(const char* op, const Tensor& tier_clock) {
  return registered_store(op, tier_clock)->store.get();
}

std::shared_ptr<RegisteredStore> unregister_store(const char* op, const Tensor& tier_clock) {
  std::shared_ptr<RegisteredStore> store = registered_store(op, tier_clock);
  const std::lock_guard<std::mutex> lock(mutex());
  stores().erase(tier_clock.data_ptr());
  return store;
}

}  // namespace dynemb::cpu
