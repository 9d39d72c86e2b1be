// Memory of a group of tables on a GPU: reserved address ranges with physical memory mapped as the
// tables grow, so that neither rows nor tensors ever move.
//
// The host maps before it launches, from an upper bound: the counts reported by the last finished
// call (the mirror) plus the ids of the calls since. Kernels check the mapped limits and refuse the
// rest, so a wrong bound costs an error, never a wrong access.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cuda/runtime/launch.h"
#include "cuda/runtime/stream_order.h"

namespace dynemb::cuda {

// Words in host memory shared with the device, without waiting:
//   mirror: counts of the tables, written at the end of every plan;
//   limits: mapped sizes, written by the host.
enum SharedWord : int {
  kSharedCalls = 0,  // number of the last finished call
  kSharedHeadWords = 1
};
enum SharedTableWord : int {
  kSharedSize = 0,
  kSharedBucketCount = 1,
  kSharedTombstones = 2,
  kSharedBucketLimit = 3,
  kSharedMostIds = 4,  // largest number of the table's ids in one call so far
  kSharedTableWords = 5
};
enum SharedSlabWord : int {
  kSharedNextRow = 0,
  kSharedRowLimit = 1,
  kSharedPendingLimit = 2,  // entries of pending gradients
  kSharedSlabWords = 3
};

struct SharedWords {
  volatile int64_t* words = nullptr;  // nullptr: fully mapped tensors; no limits, no mirror
  int64_t table_count = 0;

  __host__ __device__ volatile int64_t* table(int64_t t) const {
    return words + kSharedHeadWords + t * kSharedTableWords;
  }
  __host__ __device__ volatile int64_t* slab(int64_t s) const {
    return words + kSharedHeadWords + table_count * kSharedTableWords + s * kSharedSlabWords;
  }
};

class GroupMemory;

// The group of `buckets`; nullptr for tensors that were not reserved. Raises for a reserved tensor
// of a group that has not been bound.
std::shared_ptr<GroupMemory> group_memory(const Call& call, const Tensor& buckets);

// The order of the group's calls; nullptr: they come on one stream.
std::shared_ptr<StreamOrder> stream_order(const Tensor& buckets);

// Forgets the group with buckets at this address, if any.
void forget_group(void* buckets);

// Limits of an insertion, known beforehand.
struct InsertionRoom {
  bool mapped = true;       // false: memory for the bound is short; count first
  bool growth = true;       // an index may have to grow in this call
  bool expected = true;     // and will, if tables get no more ids than in a call so far
  int64_t old_buckets = 0;  // upper bound of the buckets under rehash
  int64_t call_number = 0;  // reported by the device when it has done the call; 0: nothing is
                            // reported
};

// Maps memory for a call that may insert `ids` ids into each of the tables, and count as many in
// their counter tables.
InsertionRoom prepare_insertion(const Call& call, GroupMemory* group,
                                const std::vector<int64_t>& feature_tables,
                                const std::vector<int64_t>& feature_policies, int64_t ids);

// New ids of a call, by table.
struct NewIdCounts {
  std::vector<int64_t> inserted;  // admitted ones
  std::vector<int64_t> counted;   // counter tables: ids counted for the first time
};

// Maps memory for exactly these new ids after the stream has been synchronised; raises if it is
// short.
void map_exactly(const Call& call, GroupMemory* group, const NewIdCounts& new_ids);

// Maps memory for an index of `buckets` buckets.
void map_buckets(const Call& call, GroupMemory* group, int64_t table, int64_t buckets);

SharedWords shared_words(const GroupMemory* group);

// Raises if the call is captured: a replay does not run what the host does at the end of a step.
void check_step_is_not_captured(const Call& call);

// Ends a training step of a group: see end_step_.
void end_group_step(const Call& call, const Tensor& buckets, const Tensor& tables,
                    const Tensor& row_clock);

// The report of the group's last end_step_; false: none.
bool read_reported_counts(const GroupMemory& group, std::vector<int64_t>* tables,
                          std::vector<int64_t>* row_clock);

// At most so many ids are erased: rehashes that drop tombstones may become necessary.
void note_erasure(GroupMemory* group, int64_t ids);

// The group of these handles of pending gradients; nullptr for tensors that were not reserved.
// Raises for a reserved tensor of a group that has not been bound.
std::shared_ptr<GroupMemory> group_of_pending(const Call& call, const Tensor& handles);

// Maps memory for the gradients of `ids` more ids in the touched slabs. Returns how many entries
// each slab must merge first, 0 for none.
std::vector<int64_t> prepare_append(const Call& call, GroupMemory* group,
                                    const std::vector<bool>& touched, int64_t ids);

// Upper bounds of the entries to merge, by slab; 0: nothing to merge.
std::vector<int64_t> prepare_merge(const Call& call, GroupMemory* group);

// Upper bounds of the rows in handles of pending gradients, by slab.
std::vector<int64_t> handle_rows(const Call& call, const GroupMemory& group);

// Records that an update applies the entries with these handles: if they are pending gradients,
// they are cleared before the step ends.
void note_applied(const Tensor& handles);

// An upper bound of the rows in use in the slab with these generations: the mapped rows, or `rows`,
// the size of the tensor, if it was not reserved.
int64_t row_bound(const Call& call, const void* generations, int64_t rows);

}  // namespace dynemb::cuda
