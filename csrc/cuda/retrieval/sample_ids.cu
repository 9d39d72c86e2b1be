// sample_ids: live ids of a table, each with the same probability, with replacement.
#include "arguments/retrieval.h"
#include "core/retrieval/sampling.h"
#include "cuda/index/args.h"

namespace dynemb::cuda {
namespace {

constexpr int64_t kSegments = 1024;  // of an index, with a count of ids each

struct SampleArgs {
  IndexArgs index;
  int64_t table;
  const int64_t* seed;
  int64_t samples;
  int64_t* ids;
  bool* by_rank;         // no try of the sample has found an id
  int64_t* ranks_drawn;  // number of these samples
  int64_t* live;         // [kSegments] ids of each segment
};

__device__ __forceinline__ int64_t segment_begin(const TableView& table, int64_t segment) {
  return table.bucket_count * segment / kSegments;
}

// A thread per sample. Per try: 16 bytes of a random 64-byte line.
__global__ void draw_slots(SampleArgs args, ErrorSink errors) {
  const int64_t i = thread_number();
  if (i >= args.samples) return;
  args.by_rank[i] = false;
  args.ids[i] = 0;
  if (args.index.table_row(args.table)[kTableSize] <= 0) {
    errors.report(kErrorEmptyTable, args.table);
    return;
  }
  const TableView table = table_view(args.index, args.table);
  const int64_t slots = table.bucket_count * kBucketWidth;
  for (int attempt = 0; attempt < kSampleTries; ++attempt) {
    const int64_t slot = sampled_slot(*args.seed, i, attempt, slots);
    const int64_t* line = table.line(slot / kBucketWidth);
    if (line[kBucketWidth + slot % kBucketWidth] != 0) {
      args.ids[i] = line[slot % kBucketWidth];
      return;
    }
  }
  args.by_rank[i] = true;
  atomicAdd(reinterpret_cast<unsigned long long*>(args.ranks_drawn), 1ULL);
}

// A block per segment; ends at once if no sample needs a rank.
__global__ void count_live(SampleArgs args) {
  if (*args.ranks_drawn == 0) return;
  const TableView table = table_view(args.index, args.table);
  const int64_t begin = segment_begin(table, blockIdx.x) * kBucketWidth;
  const int64_t end = segment_begin(table, blockIdx.x + 1) * kBucketWidth;
  unsigned long long live = 0;
  for (int64_t slot = begin + threadIdx.x; slot < end; slot += blockDim.x) {
    live += table.line(slot / kBucketWidth)[kBucketWidth + slot % kBucketWidth] != 0 ? 1 : 0;
  }
  if (live > 0) atomicAdd(reinterpret_cast<unsigned long long*>(args.live + blockIdx.x), live);
}

// A thread per sample, of which few need a rank: these read the counts and a segment.
__global__ void draw_ranks(SampleArgs args) {
  const int64_t i = thread_number();
  if (i >= args.samples || !args.by_rank[i]) return;
  const TableView table = table_view(args.index, args.table);
  int64_t live = 0;
  for (int64_t segment = 0; segment < kSegments; ++segment) live += args.live[segment];
  if (live == 0) return;
  int64_t rank = sampled_rank(*args.seed, i, live);
  int64_t segment = 0;
  for (; rank >= args.live[segment]; ++segment) rank -= args.live[segment];
  const int64_t end = segment_begin(table, segment + 1) * kBucketWidth;
  for (int64_t slot = segment_begin(table, segment) * kBucketWidth; slot < end; ++slot) {
    const int64_t* line = table.line(slot / kBucketWidth);
    if (line[kBucketWidth + slot % kBucketWidth] == 0) continue;
    if (rank-- == 0) {
      args.ids[i] = line[slot % kBucketWidth];
      return;
    }
  }
}

Tensor sample_ids(Tensor buckets, Tensor tables, Tensor meta, int64_t table, Tensor seed,
                  int64_t samples) {
  const Call call("sample_ids", "buckets", buckets);
  const IndexArgs index = index_args(call, buckets, nullptr, tables, meta);
  check_table_number(call.op, table, index.table_count);
  const int64_t* word = sample_seed(call, seed, samples);
  Tensor result = call.empty({samples}, ScalarType::Long);
  if (samples == 0) return result;
  Scratch scratch;
  const auto counts = scratch.add<int64_t>(1 + kSegments);
  const auto flags = scratch.add<bool>(samples);
  scratch.allocate(call);
  call.fill(scratch.get(counts), 0, (1 + kSegments) * 8);
  const SampleArgs args{index,
                        table,
                        word,
                        samples,
                        static_cast<int64_t*>(result.data_ptr()),
                        scratch.get(flags),
                        scratch.get(counts),
                        scratch.get(counts) + 1};
  constexpr int64_t kCountBlock = 128;
  call.launch(draw_slots, samples, 0, args, error_sink(call));
  call.launch(count_live, kSegments * kCountBlock, kCountBlock, args);
  call.launch(draw_ranks, samples, 0, args);
  return result;
}

}  // namespace
}  // namespace dynemb::cuda

DYNEMB_IMPLEMENT_OPS(m) { m.impl("sample_ids", TORCH_BOX(&dynemb::cuda::sample_ids)); }
