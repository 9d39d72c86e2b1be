// set_handles_: gives ids in their tables other rows.
#include "cuda/index/args.h"
#include "cuda/memory/table_memory.h"

namespace dynemb::cuda {
namespace {

// A thread per id. As find_ids (find.cu), and 8 bytes written at random.
__global__ void replace_handles(IndexArgs index, FeatureArgs features, ErrorSink errors,
                                int64_t threads, const int64_t* handles, bool* found) {
  const int64_t i = thread_number();
  if (i < threads) check_offset(features, errors, i);
  if (i >= features.count) return;
  const int64_t t = features.table_of(i);
  const TableView table = table_view(index, t);
  const FoundSlot at = find_slot(table, features.ids[i]);
  found[i] = at.stored != 0;
  if (found[i]) table.line(at.bucket)[kBucketWidth + at.slot] = encode_handle(handles[i]);
}

// Returns which ids are in their tables. Ids must be distinct.
Tensor set_handles_(Tensor buckets, Tensor tables, Tensor meta, Tensor ids, Tensor offsets,
                    std::vector<int64_t> feature_tables, Tensor handles) {
  const Call call("set_handles_", "buckets", buckets);
  const IndexArgs index = index_args(call, buckets, nullptr, tables, meta);
  const InOrder in_order(call, stream_order(buckets));
  Scratch scratch;
  const auto words = scratch.add<int64_t>(static_cast<int64_t>(feature_tables.size()));
  scratch.allocate(call);
  const FeatureArgs features =
      feature_args(call, ids, offsets, feature_tables, index.table_count, scratch.get(words));
  const int64_t* handle = id_words(call, "handles", handles, features.count);
  Tensor found = call.empty({features.count}, ScalarType::Bool);
  upload_words(call, feature_tables, scratch.get(words));
  const int64_t threads = features.threads();
  call.launch(replace_handles, threads, 0, index, features, error_sink(call), threads, handle,
              static_cast<bool*>(found.data_ptr()));
  return found;
}

}  // namespace
}  // namespace dynemb::cuda

DYNEMB_IMPLEMENT_OPS(m) { m.impl("set_handles_", TORCH_BOX(&dynemb::cuda::set_handles_)); }
