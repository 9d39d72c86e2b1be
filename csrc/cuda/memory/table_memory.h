// Memory of a group of tables on a GPU: reserved address ranges in which physical memory is mapped
// as the tables grow, so that neither rows nor tensors ever move.
//
// The host maps before it launches, from an upper bound: the counts that the last finished call
// reported (the mirror) plus the ids of the calls since. Kernels check the mapped limits and refuse
// what would not fit, so a bound that is wrong costs an error, never a wrong access.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cuda/runtime/launch.h"

namespace dynemb::cuda {

// Words in host memory that the device reads and writes while the host looks on.
//   mirror: what the tables hold, written at the end of every plan;
//   limits: what has been mapped, written by the host.
enum SharedWord : int {
  kSharedCalls = 0,  // number of the last call that has been done
  kSharedHeadWords = 1
};
enum SharedTableWord : int {
  kSharedSize = 0,
  kSharedBucketCount = 1,
  kSharedTombstones = 2,
  kSharedBucketLimit = 3,
  kSharedMostIds = 4,  // of the table in one call so far
  kSharedTableWords = 5
};
enum SharedSlabWord : int {
  kSharedNextRow = 0,
  kSharedRowLimit = 1,
  kSharedPendingLimit = 2,  // entries of pending gradients
  kSharedSlabWords = 3
};

struct SharedWords {
  volatile int64_t* words =
      nullptr;  // nullptr: tensors that are fully mapped; no limits, no mirror
  int64_t table_count = 0;

  __host__ __device__ volatile int64_t* table(int64_t t) const {
    return words + kSharedHeadWords + t * kSharedTableWords;
  }
  __host__ __device__ volatile int64_t* slab(int64_t s) const {
    return words + kSharedHeadWords + table_count * kSharedTableWords + s * kSharedSlabWords;
  }
};

class GroupMemory;

// The group that `buckets` belongs to; nullptr for tensors that were not reserved. Raises for a
// reserved tensor whose group has not been bound.
std::shared_ptr<GroupMemory> group_memory(const Call& call, const Tensor& buckets);

// Forgets the group whose buckets begin at this address, if there is one.
void forget_group(void* buckets);

// What an insertion must know beforehand.
struct InsertionRoom {
  bool mapped = true;       // false: memory for the bound is not to be had; count first
  bool growth = true;       // an index may have to grow in this call
  bool expected = true;     // and will, if tables get no more ids than they have had in a call
  int64_t old_buckets = 0;  // at most so many buckets are rehashed
  int64_t call_number = 0;  // what the device reports when it has done the call; 0: nothing
};

// Maps memory for a call that may insert `ids` ids into each of the tables, and count as many in
// their counter tables.
InsertionRoom prepare_insertion(const Call& call, GroupMemory* group,
                                const std::vector<int64_t>& feature_tables,
                                const std::vector<int64_t>& feature_policies, int64_t ids);

// New ids of a call, by table.
struct NewIdCounts {
  std::vector<int64_t> inserted;  // that are admitted
  std::vector<int64_t> counted;   // counter tables: that are counted for the first time
};

// Maps memory for exactly these new ids after the stream has been synchronised; raises if it is not
// to be had.
void map_exactly(const Call& call, GroupMemory* group, const NewIdCounts& new_ids);

// Maps memory for an index of `buckets` buckets.
void map_buckets(const Call& call, GroupMemory* group, int64_t table, int64_t buckets);

SharedWords shared_words(const GroupMemory* group);

// What an op at the end of a training step does for a group: see end_step.
void end_group_step(const Call& call, const Tensor& buckets, const Tensor& tables,
                    const Tensor& row_clock);

// What the group's last end_step has reported; false: nothing.
bool read_reported_counts(const GroupMemory& group, std::vector<int64_t>* tables,
                          std::vector<int64_t>* row_clock);

// At most so many ids are erased: rehashes that drop tombstones may become necessary.
void note_erasure(GroupMemory* group, int64_t ids);

// The group whose pending gradients have these handles; nullptr for tensors that were not reserved.
// Raises for a reserved tensor whose group has not been bound.
std::shared_ptr<GroupMemory> group_of_pending(const Call& call, const Tensor& handles);

// Maps memory for the gradients of `ids` more ids in the slabs that are touched. Returns how many
// entries each slab must merge first, 0 for none.
std::vector<int64_t> prepare_append(const Call& call, GroupMemory* group,
                                    const std::vector<bool>& touched, int64_t ids);

// What merging will find: at most so many entries by slab, 0 where there is nothing to merge.
std::vector<int64_t> prepare_merge(const Call& call, GroupMemory* group);

// Rows that the handles of pending gradients can name, by slab.
std::vector<int64_t> handle_rows(const Call& call, const GroupMemory& group);

// An update applies the entries with these handles: if they are pending gradients, they are cleared
// before the step ends.
void note_applied(const Tensor& handles);

// An upper bound of the rows in use in the slab with these generations: what is mapped, or `rows`,
// the size of the tensor, if it was not reserved.
int64_t row_bound(const Call& call, const void* generations, int64_t rows);

}  // namespace dynemb::cuda
