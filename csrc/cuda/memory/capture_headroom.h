// Room for replays of captured steps, of whose new ids the host learns only afterwards.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "cuda/index/tensors.cuh"
#include "cuda/memory/calls_in_flight.h"
#include "cuda/memory/insertion_bounds.h"
#include "cuda/memory/mapped_tables.h"

namespace dynemb::cuda {

// Replays of a captured step that the host may be ahead of what the device has confirmed: each
// takes memory, and a device that has two of them to do is not idle.
constexpr int64_t kReplaysAhead = 2;
// Room is made for these and the one that comes next.
constexpr int64_t kReplaysOfHeadroom = kReplaysAhead + 1;

class CaptureHeadroom {
 public:
  CaptureHeadroom(const Call& call, const IndexArgs& index, SharedWords shared,
                  SharedWords device_words, MappedTables* tables, CallsInFlight* calls,
                  const InsertionBounds& bounds);
  ~CaptureHeadroom();
  CaptureHeadroom(const CaptureHeadroom&) = delete;

  // An insertion that is being captured: makes room for what has been captured so far.
  void add(const Call& call, const std::vector<bool>& touched, int64_t ids);
  void end_capture();
  bool has_captured() const { return captured_.ids > 0; }
  // The end of a step: waits until the host is no more than kReplaysAhead ahead, and makes room for
  // the replays that may follow before it looks again.
  void end_step(const Call& call);

 private:
  // What captured calls may bring a table in one replay.
  struct TableIds {
    int64_t ids = 0;  // if all of the calls' ids are the table's
    int64_t calls = 0;
  };
  // What captured calls may bring in one replay.
  struct Replay {
    explicit Replay(size_t count) : tables(count) {}
    void cover(const Replay& other);

    int64_t ids = 0;
    std::vector<TableIds> tables;
  };

  int64_t own_ids(size_t table, const TableIds& captured) const;
  // What a table must have for kReplaysOfHeadroom more replays.
  struct TableNeeds {
    int64_t buckets;     // that it has, by all rehashes under way
    int64_t exactly;     // that it must get; 0: no rehash
    int64_t by_quarter;  // that it gets if there is memory, so that growth is rare; 0: no rehash
  };
  TableNeeds needs(size_t table, int64_t incoming) const;
  // Rehashes tables on the call's stream; `waits`: until that has been done.
  void make(const Call& call, const Replay& replay, bool waits);

  IndexArgs index_;
  SharedWords shared_;
  SharedWords device_words_;
  MappedTables* tables_;
  CallsInFlight* calls_;
  const InsertionBounds& bounds_;
  int32_t device_;
  Replay captured_now_;  // by the capture that is going on
  Replay captured_;      // the most of all before it
  std::array<cudaEvent_t, kReplaysAhead> step_events_{};
  size_t steps_ = 0;
};

}  // namespace dynemb::cuda
