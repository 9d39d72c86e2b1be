// export_batch: ids and handles of a table in batches, in the order of the index.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "cpu/index/args.h"

namespace dynemb::cpu {
namespace {

constexpr int64_t kLeastBuckets = 1024;  // of a call that does not end the table

// Ids, handles and scores [n, words] (zeros in a table without scores) of the occupied slots from
// bucket `begin` on, at most max_ids of them and from as many buckets, so that a call in a sparse
// index is short, too; and the next bucket (-1: the end).
std::tuple<Tensor, Tensor, Tensor, Tensor> export_batch(Tensor buckets, Tensor scores,
                                                        Tensor tables, Tensor meta, int64_t table,
                                                        int64_t begin, int64_t max_ids) {
  const char* op = "export_batch";
  const IndexArgs index = index_args(op, buckets, &scores, tables, meta);
  check_table_number(op, table, index.table_count);
  const TableView view = index.table(table);
  check_begin(op, begin, view.bucket_count);
  check_max_ids(op, max_ids);
  const int64_t end = std::min(view.bucket_count - begin, std::max(max_ids, kLeastBuckets)) + begin;
  std::vector<int64_t> id, handle, score;
  int64_t bucket = begin;
  for (; bucket < end; ++bucket) {
    if (static_cast<int64_t>(id.size()) + kBucketWidth > max_ids) break;
    const int64_t* line = view.line(bucket);
    for (int slot = 0; slot < kBucketWidth; ++slot) {
      if (line[kBucketWidth + slot] == 0) continue;
      id.push_back(line[slot]);
      handle.push_back(decode_handle(line[kBucketWidth + slot]));
      for (int64_t w = 0; w < index.score_words; ++w) {
        score.push_back(w < view.score_words ? view.score(bucket, slot)[w * kBucketWidth] : 0);
      }
    }
  }
  const auto to_tensor = [](const std::vector<int64_t>& values, const std::vector<int64_t>& size) {
    Tensor tensor = empty_cpu(size, ScalarType::Long);
    std::copy(values.begin(), values.end(), static_cast<int64_t*>(tensor.data_ptr()));
    return tensor;
  };
  const auto count = static_cast<int64_t>(id.size());
  return {to_tensor(id, {count}), to_tensor(handle, {count}),
          to_tensor(score, {count, index.score_words}),
          to_tensor({bucket < view.bucket_count ? bucket : -1}, {1})};
}

}  // namespace
}  // namespace dynemb::cpu

STABLE_TORCH_LIBRARY_IMPL(dynemb, CPU, m) {
  m.impl("export_batch", TORCH_BOX(&dynemb::cpu::export_batch));
}
