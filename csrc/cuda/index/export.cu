// export_batch: ids and handles of a table in batches, in the order of the index. Waits for the
// device, because the size of its result depends on the number of ids; training steps do not call
// it.
#include <tuple>

#include "cuda/index/args.h"
#include "cuda/index/plan.cuh"
#include "cuda/memory/table_memory.h"

namespace dynemb::cuda {
namespace {

// head: [0] ids exported, [1] first bucket that is not, relative to `begin`
enum ExportHead : int { kExportCount = 0, kExportEnd = 1, kExportHeadWords = 2 };

__device__ __forceinline__ bool occupied(const TableView& table, int64_t begin, int64_t slots,
                                         int64_t i) {
  if (i >= slots) return false;
  return table.line(begin + i / kBucketWidth)[kBucketWidth + i % kBucketWidth] != 0;
}

// A thread per slot: reads 8 of the 16 bytes of a slot, in order.
__global__ void count_occupied(IndexArgs index, int64_t t, int64_t begin, int64_t slots,
                               int32_t* block_counts) {
  const int count =
      __syncthreads_count(occupied(table_view(index, t), begin, slots, thread_number()));
  if (threadIdx.x == 0) block_counts[blockIdx.x] = count;
}

__global__ void __launch_bounds__(kPlanBlock)
    scan_occupied(int32_t* block_counts, int64_t blocks, int64_t slots, int64_t* head) {
  const int64_t total = scan_counts(block_counts, blocks);
  if (threadIdx.x != 0) return;
  head[kExportCount] = total;
  head[kExportEnd] = slots / kBucketWidth;
}

// A thread per slot. `ids` nullptr: counts the whole buckets that fit into max_ids. Otherwise
// writes those below head's end.
__global__ void export_slots(IndexArgs index, int64_t t, int64_t begin, int64_t slots,
                             int64_t max_ids, const int32_t* block_counts, int64_t* head,
                             int64_t* ids, int64_t* handles, int64_t* scores) {
  const int64_t i = thread_number();
  const TableView table = table_view(index, t);
  const bool full = occupied(table, begin, slots, i);
  const int64_t rank = block_counts[blockIdx.x] + rank_in_block(full);
  if (i >= slots) return;
  const int64_t bucket = i / kBucketWidth;
  const int slot = static_cast<int>(i % kBucketWidth);
  if (ids == nullptr) {
    if (slot == 0 && rank + kBucketWidth > max_ids) {
      atomicMin(reinterpret_cast<long long*>(head + kExportCount), static_cast<long long>(rank));
      atomicMin(reinterpret_cast<long long*>(head + kExportEnd), static_cast<long long>(bucket));
    }
    return;
  }
  if (!full || bucket >= head[kExportEnd]) return;
  const int64_t* line = table.line(begin + bucket);
  ids[rank] = line[slot];
  handles[rank] = decode_handle(line[kBucketWidth + slot]);
  for (int64_t w = 0; w < index.score_words; ++w) {
    scores[rank * index.score_words + w] =
        w < table.score_words ? table.score(begin + bucket, slot)[w * kBucketWidth] : 0;
  }
}

// Ids, handles and scores [n, words] of the occupied slots from bucket `begin` on, at most max_ids
// of them, and the next bucket (-1: the end).
std::tuple<Tensor, Tensor, Tensor, Tensor> export_batch(Tensor buckets, Tensor scores,
                                                        Tensor tables, Tensor meta, int64_t table,
                                                        int64_t begin, int64_t max_ids) {
  const Call call("export_batch", "buckets", buckets);
  const IndexArgs index = index_args(call, buckets, &scores, tables, meta);
  const InOrder in_order(call, stream_order(buckets));
  check_table_number(call.op, table, index.table_count);
  check_max_ids(call.op, max_ids);
  const int64_t* row = index.tables + table * kTableColumns;
  const int64_t bucket_count = call.read("reading counts", row + kTableBucketCount, 1)[0];
  check_begin(call.op, begin, bucket_count);
  // As many buckets as ids are wanted: more than a batch needs in a table that is in use.
  const int64_t most = std::min<int64_t>(max_ids, int64_t{1} << 28);
  const int64_t bucket_range = std::min(bucket_count - begin, std::max<int64_t>(most, 1024));
  const int64_t slots = bucket_range * kBucketWidth;
  const int64_t blocks = std::max<int64_t>((slots + kRankBlock - 1) / kRankBlock, 1);
  Scratch scratch;
  const auto count_part = scratch.add<int32_t>(blocks);
  const auto head_part = scratch.add<int64_t>(kExportHeadWords);
  scratch.allocate(call);
  int32_t* block_counts = scratch.get(count_part);
  int64_t* head = scratch.get(head_part);
  call.launch(count_occupied, blocks * kRankBlock, kRankBlock, index, table, begin, slots,
              block_counts);
  call.launch(scan_occupied, kPlanBlock, kPlanBlock, block_counts, blocks, slots, head);
  call.launch(export_slots, blocks * kRankBlock, kRankBlock, index, table, begin, slots, max_ids,
              block_counts, head, nullptr, nullptr, nullptr);
  const auto result = call.read("reading counts", head, kExportHeadWords);
  const int64_t count = result[kExportCount];
  Tensor ids = call.empty({count}, ScalarType::Long);
  Tensor handles = call.empty({count}, ScalarType::Long);
  Tensor exported_scores = call.empty({count, index.score_words}, ScalarType::Long);
  if (count > 0) {
    call.launch(export_slots, blocks * kRankBlock, kRankBlock, index, table, begin, slots, max_ids,
                block_counts, head, static_cast<int64_t*>(ids.data_ptr()),
                static_cast<int64_t*>(handles.data_ptr()),
                static_cast<int64_t*>(exported_scores.data_ptr()));
  }
  const int64_t end = begin + result[kExportEnd];
  Tensor next = call.empty({1}, ScalarType::Long);
  upload_words(call, {end < bucket_count ? end : -1}, static_cast<int64_t*>(next.data_ptr()));
  return {ids, handles, exported_scores, next};
}

}  // namespace
}  // namespace dynemb::cuda

DYNEMB_IMPLEMENT_OPS(m) { m.impl("export_batch", TORCH_BOX(&dynemb::cuda::export_batch)); }
