// Open segments: the most recently used ones, as many as the process may have.
//
// A store of many segments has more files than a process may open (RLIMIT_NOFILE). The table keeps
// the descriptors that were used last, and opens others again when they are needed, as RocksDB's
// table cache does. All stores of a process together use at most a quarter of the limit; each may
// use kLeastFiles. A descriptor in reserve serves when the process has none left. For one thread at
// a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <unordered_map>
#include <utility>

namespace dynemb::cpu {

class OpenFiles {
 public:
  using Key = std::pair<size_t, int64_t>;  // slab and number of a segment

  OpenFiles();
  ~OpenFiles();
  OpenFiles(const OpenFiles&) = delete;
  OpenFiles& operator=(const OpenFiles&) = delete;

  // The descriptor of an open segment, otherwise -1.
  int find(const Key& key) {
    if (!files_.empty() && files_.front().key == key) return files_.front().descriptor;
    const auto found = by_key_.find(key);
    if (found == by_key_.end()) return -1;
    files_.splice(files_.begin(), files_, found->second);
    files_.front().last_use = ++uses_;
    return files_.front().descriptor;
  }
  // The descriptor of a closed segment, by open(), which returns it or -1 and sets errno. If the
  // process has no descriptor left, the least recently used one is closed. Returns -1 if open()
  // fails, and if all descriptors are in use: then errno is EMFILE or ENFILE.
  int get(const Key& key, const std::function<int()>& open);
  // The same for a file that is not kept, such as a directory: the caller closes it.
  int open_once(const std::function<int()>& open);
  // Until end_batch(), descriptors that get() returns stay open.
  void begin_batch() { batch_begin_ = uses_; }
  void end_batch() { batch_begin_ = kNoBatch; }

  // Keeps an open file open until unpin() was called as often: a thread uses its descriptor.
  void pin(const Key& key) { ++by_key_.at(key)->pins; }
  void unpin(const Key& key) { --by_key_.at(key)->pins; }

  // Sets whether a file has writes that may not be durable. Closing such a file calls `sync` first,
  // which returns 0 or an errno.
  void set_unsynced(const Key& key, bool unsynced);
  // Sets the function that makes such writes durable.
  void sync_by(std::function<int(int)> sync) { sync_ = std::move(sync); }

  void close(const Key& key);
  void rename(const Key& from, const Key& to);
  size_t size() const { return files_.size(); }
  // Limit of files that all stores of the process may have open.
  static int64_t limit();

 private:
  struct File {
    Key key;
    int descriptor;
    int64_t last_use;
    bool unsynced;
    int64_t pins;
  };
  struct Hash {
    size_t operator()(const Key& key) const {
      return std::hash<int64_t>()(key.second * 64 + static_cast<int64_t>(key.first));
    }
  };
  static constexpr int64_t kNoBatch = INT64_MAX;

  // Closes the least recently used file; false: all are in use.
  bool close_oldest();
  void reserve();

  std::list<File> files_;  // most recently used first
  std::unordered_map<Key, std::list<File>::iterator, Hash> by_key_;
  std::function<int(int)> sync_;
  int64_t uses_ = 0;
  int64_t batch_begin_ = kNoBatch;
  int reserve_ = -1;
};

}  // namespace dynemb::cpu
