#include "arguments/index.h"

#include "core/columns.h"
#include "core/index/bucket.h"
#include "core/policy/decisions.h"

namespace dynemb {
namespace {

// Number of words that `scores` keeps per id; 0 if it has no rows.
int64_t score_words_of(const CallContext& call, const Tensor& scores) {
  check_tensor(call, "scores", scores, ScalarType::Long);
  DYNEMB_CHECK(scores.dim() == 2, "dynemb::", call.op, ": scores has ", scores.dim(),
               " dimensions, expected 2");
  const int64_t words = scores.size(1) / kBucketWidth;
  DYNEMB_CHECK(scores.size(1) == words * kBucketWidth && words >= 1 && words <= kMaxScoreWords,
               "dynemb::", call.op, ": scores.size(1) is ", scores.size(1), ", expected 1 to ",
               kMaxScoreWords, " words for each of ", kBucketWidth, " slots");
  return scores.size(0) > 0 ? words : 0;
}

int64_t* words_of(const Tensor& tensor) { return static_cast<int64_t*>(tensor.data_ptr()); }

// Returns whether `offsets` is empty, as a call of one feature may pass it: all ids are in one bag.
bool is_one_bag(const Tensor& offsets, int64_t features) {
  return features == 1 && offsets.dim() == 1 && offsets.numel() == 0;
}

}  // namespace

IndexTensors index_tensors(const CallContext& call, const Tensor& buckets, const Tensor* scores,
                           const Tensor& tables, const Tensor& meta) {
  check_tensor(call, "buckets", buckets, ScalarType::Long);
  check_size(call.op, "buckets", buckets, 1, kBucketWords);
  check_tensor(call, "tables", tables, ScalarType::Long);
  check_size(call.op, "tables", tables, 1, kTableColumns);
  const int64_t table_count = tables.size(0);
  check_tensor(call, "meta", meta, ScalarType::Long);
  check_size(call.op, "meta", meta, 0, table_count);
  check_size(call.op, "meta", meta, 1, kMetaColumns);
  IndexTensors index{words_of(buckets), buckets.size(0), nullptr,    0,
                     words_of(tables),  words_of(meta),  table_count};
  if (scores != nullptr) {
    index.score_words = score_words_of(call, *scores);
    if (index.score_words > 0) {
      check_size(call.op, "scores", *scores, 0, index.bucket_capacity);
      index.scores = words_of(*scores);
    }
  }
  return index;
}

AllocationTensors allocation_tensors(const CallContext& call, const Tensor& slabs,
                                     const Tensor& free_rows) {
  check_tensor(call, "slabs", slabs, ScalarType::Long);
  check_size(call.op, "slabs", slabs, 1, kSlabColumns);
  check_tensor(call, "free_rows", free_rows, ScalarType::Long);
  check_size(call.op, "free_rows", free_rows, 0, slabs.size(0));
  DYNEMB_CHECK(free_rows.dim() == 2, "dynemb::", call.op, ": free_rows has ", free_rows.dim(),
               " dimensions, expected 2");
  return {words_of(slabs), slabs.size(0), words_of(free_rows), free_rows.size(1)};
}

IdTensors id_tensors(const CallContext& call, const Tensor& ids, const Tensor& offsets,
                     const std::vector<int64_t>& feature_tables, int64_t table_count) {
  check_tensor(call, "ids", ids, ScalarType::Long);
  check_tensor(call, "offsets", offsets, ScalarType::Long);
  DYNEMB_CHECK(ids.dim() == 1, "dynemb::", call.op, ": ids has ", ids.dim(),
               " dimensions, expected 1: flatten it");
  const int64_t features = static_cast<int64_t>(feature_tables.size());
  const bool one_bag = is_one_bag(offsets, features);
  const int64_t bags = one_bag ? 1 : offsets.numel() - 1;
  DYNEMB_CHECK(features > 0, "dynemb::", call.op,
               ": feature_tables is empty, expected the table of each feature");
  DYNEMB_CHECK(offsets.dim() == 1 && bags >= 0 && bags % features == 0, "dynemb::", call.op,
               ": offsets has ", offsets.numel(), " elements, expected features * batch + 1 with ",
               features, " features");
  for (int64_t f = 0; f < features; ++f) {
    DYNEMB_CHECK(feature_tables[f] >= 0 && feature_tables[f] < table_count, "dynemb::", call.op,
                 ": feature_tables[", f, "] is ", feature_tables[f], ", expected 0 to ",
                 table_count - 1);
  }
  return {words_of(ids), ids.numel(), one_bag ? nullptr : words_of(offsets), bags / features,
          features};
}

void check_id_limit(const char* op, int64_t count) {
  DYNEMB_CHECK(count < (int64_t{1} << 31), "dynemb::", op, ": ids has ", count,
               " elements, expected fewer than 2^31: split the batch");
}

const int64_t* id_words(const CallContext& call, const char* name, const Tensor& words,
                        int64_t count) {
  check_tensor(call, name, words, ScalarType::Long);
  check_length(call.op, name, words, count);
  return words_of(words);
}

const bool* admit_tensor(const CallContext& call, const std::optional<Tensor>& admit, int64_t count,
                         bool by_policy) {
  if (!admit.has_value()) return nullptr;
  check_tensor(call, "admit", *admit, ScalarType::Bool);
  check_length(call.op, "admit", *admit, count);
  DYNEMB_CHECK(by_policy, "dynemb::", call.op, ": admit is given, but no table has a policy");
  return static_cast<const bool*>(admit->data_ptr());
}

int64_t* evicted_tensor(const CallContext& call, const Tensor& evicted) {
  check_tensor(call, "evicted", evicted, ScalarType::Long);
  check_size(call.op, "evicted", evicted, 1, kEvictedColumns);
  DYNEMB_CHECK(evicted.size(0) > 0, "dynemb::", call.op,
               ": evicted.size(0) is 0, expected 1 or more");
  return words_of(evicted);
}

void check_table_number(const char* op, int64_t table, int64_t table_count) {
  DYNEMB_CHECK(table >= 0 && table < table_count, "dynemb::", op, ": table is ", table,
               ", expected 0 to ", table_count - 1);
}

void check_room(const char* op, int64_t ids) {
  DYNEMB_CHECK(ids >= 0, "dynemb::", op, ": ids is ", ids, ", expected a count of at least 0");
}

void check_begin(const char* op, int64_t begin, int64_t bucket_count) {
  DYNEMB_CHECK(begin >= 0 && begin <= bucket_count, "dynemb::", op, ": begin is ", begin,
               ", expected a bucket from 0 to ", bucket_count);
}

void check_max_ids(const char* op, int64_t max_ids) {
  DYNEMB_CHECK(max_ids >= kBucketWidth, "dynemb::", op, ": max_ids is ", max_ids,
               ", expected at least a bucket of ", kBucketWidth);
}

void check_score_word(const char* op, int64_t word, int64_t score_words) {
  DYNEMB_CHECK(word >= 0 && word < score_words, "dynemb::", op, ": word is ", word,
               ", but the index keeps ", score_words,
               " scores of an id: create the tables with a policy that keeps it");
}

}  // namespace dynemb
