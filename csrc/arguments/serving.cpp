#include "arguments/serving.h"

#include "arguments/table_constants.h"
#include "core/policy/counts.h"
#include "core/serving/live_index.h"

namespace dynemb {
namespace {

static_assert(int{kLiveTableColumns} == int{kTableColumns},
              "both kinds of tables are checked alike");

void check_count(const char* op, const char* tensor, int64_t at, const char* name, int64_t count,
                 int64_t most) {
  DYNEMB_CHECK(count >= 0 && count <= most, "dynemb::", op, ": ", tensor, "[", at, ", ", name,
               "] is ", count, ", expected 0 to ", most);
}

void check_live_table(const char* op, const LiveTensors& live, int64_t t) {
  const int64_t* meta = live.meta_row(t);
  const int64_t* row = live.table_row(t);
  const int64_t begin = meta[kMetaRegionBegin];
  const int64_t region = meta[kMetaRegionBuckets];
  const int64_t buckets = live.index.bucket_capacity;
  DYNEMB_CHECK(begin >= 0 && begin <= buckets && region > 0 && region <= (buckets - begin) / 2,
               "dynemb::", op, ": the two ranges of table ", t, " do not fit into buckets with ",
               buckets, " rows: meta[", t, ", REGION_BEGIN] is ", begin, " and meta[", t,
               ", REGION_BUCKETS] is ", region);
  check_slab(op, t, meta, static_cast<int64_t>(live.slabs.size()));
  const LiveRows& rows = live.slabs[meta[kMetaSlab]];
  DYNEMB_CHECK(meta[kMetaDim] > 0 && meta[kMetaDim] <= kMostCounted &&
                   live_row_words(rows.format, meta[kMetaDim]) == rows.row_words,
               "dynemb::", op, ": weights[", meta[kMetaSlab], "] has rows of ", rows.row_words,
               " words, which are not those of table ", t, " of dim ", meta[kMetaDim]);
  DYNEMB_CHECK(rows.format != Storage::kInt4 || meta[kMetaDim] % 2 == 0, "dynemb::", op, ": table ",
               t, " has dim ", meta[kMetaDim], ", but rows of int4 have an even number of columns");
  const int64_t rehashes = __atomic_load_n(row + kLiveTableActive, __ATOMIC_RELAXED);
  check_count(op, "tables", t, "ACTIVE", rehashes, kMaxCount);
}

}  // namespace

void check_served_memory(const char* op, const char* name, const Tensor& tensor) {
  check_defined(op, name, tensor);
  DYNEMB_CHECK(tensor.is_cpu(), "dynemb::", op, ": ", name, " is on ", device_name(tensor),
               ", but ", op,
               " works on host memory: live tables are on the CPU; a GPU serves frozen ones, by "
               "find and embedding_inference");
}

LiveTensors live_tensors(const char* op, const Tensor& buckets, const Tensor& tables,
                         const Tensor& meta, const std::vector<Tensor>& weights,
                         const std::vector<int64_t>& formats) {
  LiveTensors live{index_tensors(op, buckets, nullptr, tables, meta), {}};
  DYNEMB_CHECK(!weights.empty() && weights.size() == formats.size(), "dynemb::", op, ": got ",
               weights.size(), " weights and ", formats.size(),
               " formats, expected one of each per slab");
  for (size_t s = 0; s < weights.size(); ++s) {
    check_tensor(op, "weights", weights[s], ScalarType::Long);
    DYNEMB_CHECK(weights[s].dim() == 2, "dynemb::", op, ": weights[", s, "] has ", weights[s].dim(),
                 " dimensions, expected 2");
    DYNEMB_CHECK(is_live_format(formats[s]), "dynemb::", op, ": formats[", s, "] is ", formats[s],
                 ", expected 0 (fp32), 1 (bf16), 2 (fp16), 4 (int8), 5 (int4) or 6 (fp8)");
    live.slabs.push_back({static_cast<int64_t*>(weights[s].data_ptr()), weights[s].size(0),
                          weights[s].size(1), static_cast<Storage>(formats[s])});
  }
  for (int64_t t = 0; t < live.index.table_count; ++t) check_live_table(op, live, t);
  return live;
}

const double* live_defaults(const char* op, const LiveTensors& live, const Tensor& init_data) {
  check_tensor(op, "init_data", init_data, ScalarType::Double);
  DYNEMB_CHECK(init_data.dim() == 1, "dynemb::", op, ": init_data has ", init_data.dim(),
               " dimensions, expected 1");
  const auto* data = static_cast<const double*>(init_data.data_ptr());
  for (int64_t t = 0; t < live.index.table_count; ++t) {
    const int64_t* meta = live.meta_row(t);
    check_initializers(op, t, meta, meta[kMetaDim], data, init_data.numel());
  }
  return data;
}

int64_t* live_slabs(const char* op, const LiveTensors& live, const Tensor& free) {
  check_served_memory(op, "free", free);
  check_tensor(op, "free", free, ScalarType::Long);
  DYNEMB_CHECK(free.dim() == 2, "dynemb::", op, ": free has ", free.dim(),
               " dimensions, expected 2");
  check_size(op, "free", free, 0, static_cast<int64_t>(live.slabs.size()));
  check_size(op, "free", free, 1, kLiveSlabColumns);
  auto* slabs = static_cast<int64_t*>(free.data_ptr());
  for (size_t s = 0; s < live.slabs.size(); ++s) {
    const int64_t* slab = slabs + s * kLiveSlabColumns;
    const auto at = static_cast<int64_t>(s);
    check_count(op, "free", at, "NEXT_ROW", slab[kLiveSlabNextRow], live.slabs[s].count);
    check_count(op, "free", at, "FREE_HEAD", slab[kLiveSlabFreeHead], live.slabs[s].count);
    check_count(op, "free", at, "FREE_COUNT", slab[kLiveSlabFreeCount], live.slabs[s].count);
  }
  for (int64_t t = 0; t < live.index.table_count; ++t) {
    const int64_t* row = live.table_row(t);
    const int64_t slots = live.meta_row(t)[kMetaRegionBuckets] * kBucketWidth;
    const int64_t most = live_capacity(live.meta_row(t)[kMetaRegionBuckets]);
    check_count(op, "tables", t, "CAPACITY", row[kLiveTableCapacity], most);
    check_count(op, "tables", t, "SIZE", row[kLiveTableSize], row[kLiveTableCapacity]);
    check_count(op, "tables", t, "TOMBSTONES", row[kLiveTableTombstones], slots);
    for (int column = kLiveTableInserted; column <= kLiveTableBatches; ++column) {
      check_count(op, "tables", t, "a count", row[column], kMaxCount);
    }
  }
  return slabs;
}

}  // namespace dynemb
