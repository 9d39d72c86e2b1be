// Order of a group's calls on several streams.
//
//   main         insert  stage  | forward  backward  step
//                               v                     ^
//   prefetches                  find  plan  move -----'
//
// A call waits for the last one of its group, if that was on another stream. So no insertion moves
// an index that a prefetch reads, and no lookup reads a row that is on its way.
//
// Calls in a capture wait for those of the same capture only: CUDA refuses waits from a capture to
// other work. The stream of the steps therefore waits for calls on other streams at once, if the
// group has captured calls: replays come later on that stream.
#pragma once

#include <memory>
#include <mutex>
#include <optional>

#include "cuda/runtime/launch.h"

namespace dynemb::cuda {

class StreamOrder {
 public:
  // Events cannot be made in a capture.
  explicit StreamOrder(const Call& call);
  ~StreamOrder();
  StreamOrder(const StreamOrder&) = delete;

  // Lets the call's stream wait for the last call on another stream.
  void wait(const Call& call) const;
  // Ends a call; does not throw.
  void record(const Call& call) noexcept;
  // Replays of captured steps come on the call's stream.
  void note_steps(const Call& call) { steps_ = call.stream; }

 private:
  friend class InOrder;

  struct Last {
    cudaEvent_t event = nullptr;
    cudaStream_t stream = nullptr;
    unsigned long long capture = 0;
    bool recorded = false;
  };

  std::mutex mutex_;
  Last eager_;
  Last captured_;
  std::optional<cudaStream_t> steps_;
};

// A call of a group, from its first work on a stream to its last. Other calls of the group begin
// before or after it.
class InOrder {
 public:
  // nullptr: calls of the group come on one stream.
  InOrder(const Call& call, std::shared_ptr<StreamOrder> order);
  ~InOrder();
  InOrder(const InOrder&) = delete;

 private:
  const Call& call_;
  std::shared_ptr<StreamOrder> order_;
  std::unique_lock<std::mutex> lock_;
};

}  // namespace dynemb::cuda
