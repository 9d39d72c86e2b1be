// Batched lookup of one tile of ids, shared by find and by the first round of find_or_insert_.
#pragma once

#include <cstdint>
#include <vector>

#include "core/policy/decisions.h"
#include "cpu/index/args.h"

namespace dynemb::cpu {

struct FindJob {
  TableView table;
  const int64_t* ids;
  int64_t count;
  int64_t* handles;        // out: handle, kNoHandle or kPaddingHandle
  int32_t* missing;        // out, may be nullptr: positions of ids not found, ascending
  int64_t* missing_count;  // out
  int64_t* padding_count;  // out, may be nullptr
  ScoreUpdate update;      // applied to the slots found, if table.scores is set
};

void find_tile(const FindJob& job);

// The first result of the op `find`.
Tensor find_handles(const char* op, const Tensor& buckets, const Tensor& tables, const Tensor& meta,
                    const Tensor& ids, const Tensor& offsets,
                    const std::vector<int64_t>& feature_tables);

}  // namespace dynemb::cpu
