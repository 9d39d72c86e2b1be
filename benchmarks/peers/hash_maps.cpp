// Hash maps of C++ libraries, int64 -> int64, behind one C interface that Python calls with ctypes.
//
// A map may be split into shards (by the top bits of a multiplied key), one thread a shard: that is
// how these maps, none of which takes concurrent writers, are filled by several threads. Reads use
// threads on any split.

#include <absl/container/flat_hash_map.h>
#define C10_USING_CUSTOM_GENERATED_MACROS
#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

constexpr int64_t kMissing = -1;
constexpr int64_t kShardBlock = 1024;

template <class Map, class = void>
struct HasPrefetch : std::false_type {};
template <class Map>
struct HasPrefetch<Map, std::void_t<decltype(std::declval<const Map&>().prefetch(int64_t{}))>>
    : std::true_type {};

class HashMap {
 public:
  virtual ~HashMap() = default;
  virtual int64_t size() const = 0;
  virtual bool has_prefetch() const = 0;
  virtual void find(const int64_t* keys, int64_t* values, int64_t count, int threads,
                    int64_t prefetch_distance) const = 0;
  virtual void insert(const int64_t* keys, int64_t first_value, int64_t count,
                      int64_t prefetch_distance) = 0;
};

void run_threads(int threads, const std::function<void(int)>& work) {
  std::vector<std::thread> others;
  for (int thread = 1; thread < threads; ++thread) {
    others.emplace_back(work, thread);
  }
  work(0);
  for (auto& other : others) {
    other.join();
  }
}

template <class Map>
class ShardedMap final : public HashMap {
 public:
  explicit ShardedMap(int shards) : shards_(shards) {}

  int64_t size() const override {
    int64_t total = 0;
    for (const Map& shard : shards_) {
      total += static_cast<int64_t>(shard.size());
    }
    return total;
  }

  bool has_prefetch() const override { return HasPrefetch<Map>::value; }

  void find(const int64_t* keys, int64_t* values, int64_t count, int threads,
            int64_t prefetch_distance) const override {
    run_threads(threads, [&](int thread) {
      const int64_t begin = count * thread / threads;
      const int64_t end = count * (thread + 1) / threads;
      if (shards_.size() == 1) {
        find_range(keys + begin, values + begin, end - begin, prefetch_distance,
                   [this](int64_t) -> const Map& { return shards_[0]; });
      } else {
        find_range(keys + begin, values + begin, end - begin, prefetch_distance,
                   [this](int64_t key) -> const Map& { return shards_[shard_of(key)]; });
      }
    });
  }

  void insert(const int64_t* keys, int64_t first_value, int64_t count,
              int64_t prefetch_distance) override {
    const int threads = static_cast<int>(shards_.size());
    if (threads == 1) {
      insert_range(shards_[0], count, prefetch_distance, [=](int64_t i) {
        return std::pair<int64_t, int64_t>(keys[i], first_value + i);
      });
      return;
    }
    run_threads(threads, [&](int thread) {
      std::pair<int64_t, int64_t> own[kShardBlock];
      for (int64_t begin = 0; begin < count; begin += kShardBlock) {
        const int64_t end = std::min(count, begin + kShardBlock);
        int64_t filled = 0;
        for (int64_t i = begin; i < end; ++i) {
          own[filled] = {keys[i], first_value + i};
          filled += shard_of(keys[i]) == thread;
        }
        insert_range(shards_[thread], filled, prefetch_distance, [&](int64_t i) { return own[i]; });
      }
    });
  }

 private:
  int shard_of(int64_t key) const {
    const uint64_t mixed = static_cast<uint64_t>(key) * 0x9E3779B97F4A7C15ull;
    return static_cast<int>((mixed >> 32) * shards_.size() >> 32);
  }

  template <class ShardOf>
  static void find_range(const int64_t* keys, int64_t* values, int64_t count,
                         int64_t prefetch_distance, ShardOf shard_for) {
    for (int64_t i = 0; i < count; ++i) {
      if constexpr (HasPrefetch<Map>::value) {
        if (prefetch_distance > 0 && i + prefetch_distance < count) {
          const int64_t ahead = keys[i + prefetch_distance];
          shard_for(ahead).prefetch(ahead);
        }
      }
      const Map& map = shard_for(keys[i]);
      const auto found = map.find(keys[i]);
      values[i] = found == map.end() ? kMissing : found->second;
    }
  }

  template <class Entry>
  static void insert_range(Map& map, int64_t count, int64_t prefetch_distance, Entry entry) {
    for (int64_t i = 0; i < count; ++i) {
      if constexpr (HasPrefetch<Map>::value) {
        if (prefetch_distance > 0 && i + prefetch_distance < count) {
          map.prefetch(entry(i + prefetch_distance).first);
        }
      }
      map.emplace(entry(i));
    }
  }

  std::vector<Map> shards_;
};

}  // namespace

#define PEER_EXPORT __attribute__((visibility("default")))

extern "C" {

// Returns null for a name that is not known.
PEER_EXPORT HashMap* dynemb_peer_create(const char* name, int shards) {
  const std::string wanted = name;
  if (wanted == "absl::flat_hash_map") {
    return new ShardedMap<absl::flat_hash_map<int64_t, int64_t>>(shards);
  }
  if (wanted == "ska::flat_hash_map") {
    return new ShardedMap<ska::flat_hash_map<int64_t, int64_t>>(shards);
  }
  if (wanted == "std::unordered_map") {
    return new ShardedMap<std::unordered_map<int64_t, int64_t>>(shards);
  }
  return nullptr;
}

PEER_EXPORT void dynemb_peer_destroy(HashMap* map) { delete map; }

PEER_EXPORT int64_t dynemb_peer_size(const HashMap* map) { return map->size(); }

PEER_EXPORT int dynemb_peer_has_prefetch(const HashMap* map) { return map->has_prefetch(); }

PEER_EXPORT void dynemb_peer_find(const HashMap* map, const int64_t* keys, int64_t* values,
                                  int64_t count, int threads, int64_t prefetch_distance) {
  map->find(keys, values, count, threads, prefetch_distance);
}

PEER_EXPORT void dynemb_peer_insert(HashMap* map, const int64_t* keys, int64_t first_value,
                                    int64_t count, int64_t prefetch_distance) {
  map->insert(keys, first_value, count, prefetch_distance);
}

// Reads one word of each of `count` 64-byte lines; returns their sum.
PEER_EXPORT int64_t dynemb_peer_read_lines(const int64_t* block, int64_t words,
                                           const int64_t* lines, int64_t count,
                                           int64_t prefetch_distance) {
  const int64_t last = words / 8 - 1;
  int64_t sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (i + prefetch_distance < count) {
      __builtin_prefetch(block + 8 * std::min(lines[i + prefetch_distance], last));
    }
    sum += block[8 * std::min(lines[i], last)];
  }
  return sum;
}

}  // extern "C"
