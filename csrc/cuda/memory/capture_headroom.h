// Memory for replays of captured steps: the host learns their new ids only afterwards.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "cuda/index/tensors.cuh"
#include "cuda/memory/calls_in_flight.h"
#include "cuda/memory/insertion_bounds.h"
#include "cuda/memory/mapped_tables.h"

namespace dynemb::cuda {

// How many replays of a captured step the host may be ahead of the device: each takes memory, and a
// device with two queued replays is not idle.
constexpr int64_t kReplaysAhead = 2;
// Memory is prepared for these and the next one.
constexpr int64_t kReplaysOfHeadroom = kReplaysAhead + 1;

class CaptureHeadroom {
 public:
  CaptureHeadroom(const Call& call, const IndexArgs& index, SharedWords shared,
                  SharedWords device_words, MappedTables* tables, CallsInFlight* calls,
                  const InsertionBounds& bounds);
  ~CaptureHeadroom();
  CaptureHeadroom(const CaptureHeadroom&) = delete;

  // Called for an insertion under capture: prepares memory for the captured calls so far.
  void add(const Call& call, const std::vector<bool>& touched, int64_t ids);
  void end_capture();
  bool has_captured() const { return captured_.ids > 0; }
  // Called at the end of a step: waits until the host is at most kReplaysAhead ahead, and prepares
  // memory for the replays before the next call.
  void end_step(const Call& call);

 private:
  // Upper bounds of a table's ids in one replay.
  struct TableIds {
    int64_t ids = 0;  // if all of the calls' ids are the table's
    int64_t calls = 0;
  };
  // Upper bounds of one replay.
  struct Replay {
    explicit Replay(size_t count) : tables(count) {}
    void cover(const Replay& other);

    int64_t ids = 0;
    std::vector<TableIds> tables;
  };

  int64_t own_ids(size_t table, const TableIds& captured) const;
  // Needs of a table for kReplaysOfHeadroom more replays.
  struct TableNeeds {
    int64_t buckets;  // present ones, with all pending rehashes
    int64_t exactly;  // required size; 0: no rehash
    int64_t usual;    // preferred size if there is memory, so that growth is rare; 0: no rehash
  };
  TableNeeds needs(size_t table, int64_t incoming) const;
  // Rehashes tables on the call's stream; `waits`: until it is done.
  void make(const Call& call, const Replay& replay, bool waits);

  IndexArgs index_;
  SharedWords shared_;
  SharedWords device_words_;
  MappedTables* tables_;
  CallsInFlight* calls_;
  const InsertionBounds& bounds_;
  int32_t device_;
  Replay captured_now_;  // of the running capture
  Replay captured_;      // upper bound over earlier captures
  std::array<cudaEvent_t, kReplaysAhead> step_events_{};
  size_t steps_ = 0;
};

}  // namespace dynemb::cuda
