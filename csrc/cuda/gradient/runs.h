// Host side of the backward's dedupe.
#pragma once

#include <vector>

#include "cuda/gradient/runs.cuh"
#include "cuda/rows/args.h"

namespace dynemb::cuda {

// Words that RunSort computes on the device.
enum RunHead : int { kRunCount = 0, kRunPieces = 1, kRunHeadWords = 2 };

int bits_for(int64_t values);  // bits that hold 0 .. values - 1

// Sorts positions by the key of their row and finds the runs of one key. Key: uint32_t or uint64_t.
template <class Key>
class RunSort {
 public:
  RunSort(const Call& call, int64_t count, int bits);

  // Output for the caller: a key for each position, and the position.
  Key* keys() const { return scratch_.get(key_part_); }
  uint32_t* unsorted() const { return scratch_.get(unsorted_part_); }

  // Positions by key, stably; the first of each run and the end of the last, without those of key
  // `missing`, which is the largest; head[kRunCount].
  void find(const Call& call, Key missing, uint32_t* positions, int32_t* begin,
            int64_t* head) const;
  const Key* sorted() const { return scratch_.get(sorted_part_); }

 private:
  int64_t count_;
  int bits_;
  size_t sort_bytes_ = 0;
  size_t scan_bytes_ = 0;
  Scratch scratch_;
  Scratch::Part<Key> key_part_;
  Scratch::Part<Key> sorted_part_;
  Scratch::Part<uint32_t> unsorted_part_;
  Scratch::Part<int32_t> flag_part_;
  Scratch::Part<int32_t> number_part_;
  Scratch::Part<char> temporary_part_;
};

// Sorts the occurrences of a lookup and finds runs and pieces. Owns their memory.
class GradientSort {
 public:
  // Uploads the words of `lookup`.
  GradientSort(const Call& call, const GroupRows& rows, LookupCall* lookup, const Tensor& gradient);

  const GradientArgs& args() const { return args_; }
  const GradientRuns& runs() const { return runs_; }
  // Whether 16-byte accesses to a slab's gradients are possible.
  bool aligned(size_t slab) const { return aligned_[slab]; }

 private:
  template <class Key>
  void sort(const Call& call, const GroupRows& rows, const LookupCall& lookup, int64_t total_rows,
            int bits);

  Scratch scratch_;
  Scratch::Part<int64_t> base_part_;
  Scratch::Part<int64_t> slab_first_part_;
  Scratch::Part<int32_t> begin_part_;
  Scratch::Part<int32_t> piece_part_;
  Scratch::Part<int32_t> piece_run_part_;
  Scratch::Part<int32_t> piece_from_part_;
  Scratch::Part<int64_t> head_part_;
  Scratch::Part<uint32_t> bag_part_;
  Scratch::Part<uint32_t> position_part_;
  GradientArgs args_;
  GradientRuns runs_;
  std::vector<bool> aligned_;
};

// Destination of the reduced gradients of a slab, entry by entry.
struct ReducedOutput {
  int64_t* handles;
  int64_t* ids;
  int64_t* tables;
  float* gradients;
  int64_t* count;         // receives their number; nullptr: not needed
  const int64_t* before;  // number of existing entries, which stay; nullptr: none; < 0: nothing is
                          // written
};
void write_reduced_rows(const Call& call, const GradientSort& sort, size_t slab, int64_t dim,
                        int64_t most_runs, const ReducedOutput& output);

}  // namespace dynemb::cuda
