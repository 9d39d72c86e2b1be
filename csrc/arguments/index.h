// Checked arguments: the index tensors of a group and the ids of a call, as pointers into memory of
// their device.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "arguments/tensors.h"

namespace dynemb {

struct IndexTensors {
  int64_t* buckets;
  int64_t bucket_capacity;  // buckets in the tensor
  int64_t* scores;          // nullptr: the index keeps no scores
  int64_t score_words;      // 0: as above
  int64_t* tables;          // [table_count, kTableColumns]
  const int64_t* meta;      // [table_count, kMetaColumns]
  int64_t table_count;
};
// `scores` may be nullptr for ops that do not use them.
IndexTensors index_tensors(const CallContext& call, const Tensor& buckets, const Tensor* scores,
                           const Tensor& tables, const Tensor& meta);

// Allocation of rows.
struct AllocationTensors {
  int64_t* slabs;  // [slab_count, kSlabColumns]
  int64_t slab_count;
  int64_t* free_rows;  // [slab_count, max_rows]
  int64_t max_rows;
};
AllocationTensors allocation_tensors(const CallContext& call, const Tensor& slabs,
                                     const Tensor& free_rows);

// Ids of a call. A feature has `batch` bags.
struct IdTensors {
  const int64_t* ids;
  int64_t count;
  const int64_t* offsets;  // [features * batch + 1]; nullptr: all ids are in one bag
  int64_t batch;
  int64_t features;
};
// Does not read values of ids and offsets.
IdTensors id_tensors(const CallContext& call, const Tensor& ids, const Tensor& offsets,
                     const std::vector<int64_t>& feature_tables, int64_t table_count);
// Raises if a call has more ids than it can number.
void check_id_limit(const char* op, int64_t count);

// One word for each of `count` ids, such as handles.
const int64_t* id_words(const CallContext& call, const char* name, const Tensor& words,
                        int64_t count);

// Which ids the caller admits; nullptr: all.
const bool* admit_tensor(const CallContext& call, const std::optional<Tensor>& admit, int64_t count,
                         bool by_policy);
// The records of evicted ids [records + 1, kEvictedColumns]; the first one has counts.
int64_t* evicted_tensor(const CallContext& call, const Tensor& evicted);

// Raises unless `table` is the number of a table.
void check_table_number(const char* op, int64_t table, int64_t table_count);
// Raises unless `ids` is a valid number of ids to reserve.
void check_room(const char* op, int64_t ids);
// Raises unless `begin` is a bucket of the table, or one past the last.
void check_begin(const char* op, int64_t begin, int64_t bucket_count);
// Raises unless a batch has room for one bucket of ids.
void check_max_ids(const char* op, int64_t max_ids);
// Raises unless the index keeps the score word `word`.
void check_score_word(const char* op, int64_t word, int64_t score_words);

}  // namespace dynemb
