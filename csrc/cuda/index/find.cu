// find: handles of ids, and the number of missing ids of each table.
#include <tuple>

#include "cuda/index/args.h"
#include "cuda/memory/table_memory.h"

namespace dynemb::cuda {
namespace {

// A thread per id. Per id: 8 bytes of id and 8 of handle, in order, and one random 64-byte line
// (rarely a second). The random access is the floor: all four loads of a line are in flight at
// once.
__global__ void find_ids(IndexArgs index, FeatureArgs features, ErrorSink errors, int64_t threads,
                         int64_t* handles, int64_t* missing) {
  const int64_t i = thread_number();
  if (i < threads) check_offset(features, errors, i);
  bool is_missing = false;
  int64_t t = 0;
  if (i < features.count) {
    const int64_t id = features.ids[i];
    t = features.table_of(i);
    const FoundSlot found = find_slot(table_view(index, t), id);
    int64_t handle = decode_handle(found.stored);
    if (found.stored == 0) {
      const int64_t* meta = index.meta_row(t);
      is_missing = meta[kMetaHasPadding] == 0 || meta[kMetaPaddingId] != id;
      if (!is_missing) handle = kPaddingHandle;
    }
    handles[i] = handle;
  }
  count_by_key(is_missing, t, missing);
}

std::tuple<Tensor, Tensor> find(Tensor buckets, Tensor tables, Tensor meta, Tensor ids,
                                Tensor offsets, std::vector<int64_t> feature_tables) {
  const Call call("find", "buckets", buckets);
  const IndexArgs index = index_args(call, buckets, nullptr, tables, meta);
  const InOrder in_order(call, stream_order(buckets));
  Scratch scratch;
  const auto words = scratch.add<int64_t>(static_cast<int64_t>(feature_tables.size()));
  scratch.allocate(call);
  const FeatureArgs features =
      feature_args(call, ids, offsets, feature_tables, index.table_count, scratch.get(words));
  Tensor handles = call.empty({features.count}, ScalarType::Long);
  Tensor missing = call.empty({index.table_count}, ScalarType::Long);
  call.fill(missing.data_ptr(), 0, index.table_count * 8);
  upload_words(call, feature_tables, scratch.get(words));
  const int64_t threads = features.threads();
  call.launch(find_ids, threads, 0, index, features, error_sink(call), threads,
              static_cast<int64_t*>(handles.data_ptr()), static_cast<int64_t*>(missing.data_ptr()));
  return {handles, missing};
}

}  // namespace
}  // namespace dynemb::cuda

DYNEMB_IMPLEMENT_OPS(m) { m.impl("find", TORCH_BOX(&dynemb::cuda::find)); }
