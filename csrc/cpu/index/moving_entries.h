// Reads of an index beside the one thread that changes it. Readers take no lock: they search again
// for ids that they may have missed, because entries changed places or left meanwhile.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

namespace dynemb::cpu {

// A version, and in the low bits the number of changes in progress.
class Moves {
 public:
  void begin() {
    // release: a reader that sees the change sees the lock that it holds, too (read_between_moves)
    word_.fetch_add(1, std::memory_order_release);
    std::atomic_thread_fence(std::memory_order_release);  // before the stores of the change
  }
  void end() { word_.fetch_add(kVersion - 1, std::memory_order_release); }

  // Before a read.
  uint64_t word() const { return word_.load(std::memory_order_acquire); }
  // Of a forked process, which has none of the threads that made changes.
  void forget() { word_.store(0, std::memory_order_relaxed); }

  static bool in_progress(uint64_t word) { return word % kVersion != 0; }
  // After it: whether no change has begun since.
  bool unchanged(uint64_t word) const {
    std::atomic_thread_fence(std::memory_order_acquire);  // after the loads of the read
    return word_.load(std::memory_order_relaxed) == word;
  }

 private:
  static constexpr uint64_t kVersion = 1 << 16;
  std::atomic<uint64_t> word_{0};
};

// Those of the index with counters at `memory`. Another index may share them, and then repeats
// reads of this one in vain.
Moves& moves_of(const void* memory);

// Held while entries of an index change places or leave.
class MovingEntries {
 public:
  explicit MovingEntries(const void* memory) : moves_(moves_of(memory)) { moves_.begin(); }
  ~MovingEntries() { moves_.end(); }
  MovingEntries(const MovingEntries&) = delete;
  MovingEntries& operator=(const MovingEntries&) = delete;

 private:
  Moves& moves_;
};

// Runs read(), of a few ids of an index, until no entries have moved meanwhile.
template <class Read>
void read_unmoved(const void* memory, const Read& read) {
  const Moves& moves = moves_of(memory);
  for (;;) {
    const uint64_t before = moves.word();
    if (!Moves::in_progress(before)) {
      read();
      if (moves.unchanged(before)) return;
    }
    std::this_thread::yield();
  }
}

}  // namespace dynemb::cpu
