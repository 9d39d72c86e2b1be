// Forward of the lookups: embedding, and those without an autograd formula: embedding_forward and
// embedding_inference.
#include <algorithm>
#include <optional>
#include <tuple>

#include "arguments/clocks.h"
#include "cuda/rows/lookup.h"
#include "cuda/rows/quantized.cuh"
#include "cuda/rows/slab_lookup.h"

namespace dynemb::cuda {
namespace {

__device__ __forceinline__ void check_feature(const SlabLookup& job, int64_t feature) {
  const int64_t table = job.lookup.features.table[feature];
  if (job.rows.meta[table * kMetaColumns + kMetaDim] != job.slab.dim) {
    job.errors.report(kErrorFeatureDim, feature);
  }
}

// The ids of a bag that the lanes of a group have resolved, one each.
template <class Group>
struct ResolvedIds {
  int64_t source;  // ValueSource
  int64_t id;      // set if the value has to be computed from it
  float weight;
  int count;  // of the group's lanes

  __device__ __forceinline__ int64_t source_at(const Group& group, int lane) const {
    return group.broadcast(static_cast<long long>(source), lane);
  }
  __device__ __forceinline__ int64_t id_at(const Group& group, int lane) const {
    return group.broadcast(static_cast<long long>(id), lane);
  }
  __device__ __forceinline__ float weight_at(const Group& group, int lane) const {
    return group.broadcast(weight, lane);
  }
};

// A bag in progress: the sum of its rows in a lane's columns, and of its weights.
template <int kWidth>
struct BagSum {
  Floats<kWidth> rows;
  float weights;

  __device__ __forceinline__ void add(int64_t source, float weight, const Floats<kWidth>& value) {
    if (source != kFromPadding) weights += weight;
    if (source == kFromPadding || source == kFromZeros) return;
    add_scaled(&rows, weight, value);
  }
};

// Stored rows, several loads in flight.
template <class Reader, class Group>
__device__ __forceinline__ void add_stored(const Group& group, const SlabRows& slab,
                                           const ResolvedIds<Group>& ids, int64_t column,
                                           bool active, BagSum<Group::kWidth>* sum) {
  constexpr int kWidth = Group::kWidth;
  struct Row {
    int64_t source;
    float weight;
    typename Reader::template Loaded<kWidth> values;
  };
  stream_rows(
      ids.count,
      [&](int lane, bool wanted) {
        Row row{ids.source_at(group, lane), ids.weight_at(group, lane), {}};
        if (wanted && active && row.source >= 0) {
          row.values = Reader::template load<kWidth>(slab, row.source, column);
        }
        return row;
      },
      [&](const Row& row, int) {
        sum->add(row.source, row.weight, Reader::template floats<kWidth>(slab, row.values));
      });
}

// Rows of which some must be computed: rare after training, so not worth registers.
template <class Reader, class Group>
__device__ __forceinline__ void add_any(const Group& group, const SlabLookup& job, int64_t table,
                                        const ResolvedIds<Group>& ids, int64_t column, bool active,
                                        BagSum<Group::kWidth>* sum) {
  constexpr int kWidth = Group::kWidth;
  const TableInit init = table_init(job.rows, table);
#pragma unroll 1
  for (int j = 0; j < ids.count; ++j) {
    const int64_t source = ids.source_at(group, j);
    const int64_t id = ids.id_at(group, j);
    const float weight = ids.weight_at(group, j);
    const Floats<kWidth> value =
        active ? source_floats<kWidth, Reader>(job.slab, init, source, id, column)
               : zero_floats<kWidth>();
    sum->add(source, weight, value);
  }
}

// A group of lanes per bag; every lane resolves one id of the bag, then all lanes read the rows
// together. Per id: 8 bytes of handle in order, a random 4-byte generation and a random row of 4 *
// dim bytes (ids are read only for unwritten rows); per bag 4 * dim bytes written. Rows of 2-byte
// values take half; rows of codes take their codes and 4 or 8 bytes.
template <class Reader, class Group>
__global__ void pool_bags(Group group, SlabLookup job, float* pooled) {
  constexpr int kWidth = Group::kWidth;
  const LookupArgs& lookup = job.lookup;
  const FeatureArgs& features = lookup.features;
  if (group.number() >= job.bags()) return;
  const SlabLookup::Bag bag = job.bag(group.number());
  const int64_t begin = bag.begin;
  const int64_t end = bag.end;
  const int lane = group.lane();
  if (lane == 0) {
    check_offset(features, job.errors, bag.number);
    if (bag.row == 0) check_feature(job, bag.feature);
  }
  if (!job.has_rows_of(bag.feature)) return;
  float* output = pooled + bag.offset;
  for (int64_t first = 0; first < job.slab.dim; first += group.stride()) {
    const int64_t column = group.column(first);
    const bool active = column < job.slab.dim;
    BagSum<kWidth> sum{zero_floats<kWidth>(), 0.0f};
    for (int64_t i = begin; i < end; i += group.size()) {
      const int64_t own = i + lane;
      ResolvedIds<Group> ids{kFromZeros, 0, 1.0f,
                             static_cast<int>(min(static_cast<int64_t>(group.size()), end - i))};
      bool computed = false;
      if (own < end) {
        ids.source = value_source(job.slab, lookup.handles[own], job.errors);
        computed = is_computed(ids.source);
        if (computed) ids.id = features.ids[own];
        if (lookup.id_weights != nullptr) ids.weight = lookup.id_weights[own];
      }
      if (group.any(computed)) {
        add_any<Reader>(group, job, features.table[bag.feature], ids, column, active, &sum);
      } else {
        add_stored<Reader>(group, job.slab, ids, column, active, &sum);
      }
    }
    if (lookup.pooling == kPoolMean) {
      const MeanDivisor divisor = mean_divisor(sum.weights);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) sum.rows.value[k] = divisor.divide(sum.rows.value[k]);
    }
    if (active) store_floats<kWidth>(output + column, sum.rows);
  }
}

constexpr int kGathered = 8;                    // ids of a group of lanes, at most one of each lane
constexpr int64_t kElsewhere = kFromZeros - 8;  // no ValueSource: the row is in another slab

// A group of lanes per kGathered ids: each of them resolves one, then all lanes copy the rows
// together. Bytes as above, and 4 * dim written for every id.
template <class Reader, class Group>
__global__ void gather_rows(Group group, SlabLookup job, float* gathered) {
  constexpr int kWidth = Group::kWidth;
  const LookupArgs& lookup = job.lookup;
  const FeatureArgs& features = lookup.features;
  const int lane = group.lane();
  const int most = group.size() < kGathered ? group.size() : kGathered;
  const int64_t first_id = group.number() * most;
  const int64_t own = first_id + lane;
  int64_t source = kElsewhere;
  int64_t table = 0;
  int64_t id = 0;
  if (lane < most) {
    const int64_t bags = features.features * features.batch;
    if (own < max(bags, static_cast<int64_t>(1))) check_offset(features, job.errors, own);
    if (own < features.count) {
      const int64_t feature = features.feature_of(own);
      if (own == features.offset(feature * features.batch)) check_feature(job, feature);
      if (job.has_rows_of(feature)) {
        source = value_source(job.slab, lookup.handles[own], job.errors);
        table = features.table[feature];
        if (is_computed(source)) id = features.ids[own];
      }
    }
  }
  if (first_id >= features.count) return;
  const auto count = static_cast<int>(min(static_cast<int64_t>(most), features.count - first_id));
  const bool any_computed = group.any(is_computed(source));
  const int64_t dim = job.slab.dim;
  for (int64_t column = group.column(0); column - lane * kWidth < dim; column += group.stride()) {
    const bool active = column < dim;
    float* output = gathered + first_id * dim + column;
    if (any_computed) {
#pragma unroll 1
      for (int j = 0; j < count; ++j) {
        const int64_t from = group.broadcast(static_cast<long long>(source), j);
        const int64_t id_of_row = group.broadcast(static_cast<long long>(id), j);
        const int64_t table_of_row = group.broadcast(static_cast<long long>(table), j);
        if (!active || from == kElsewhere) continue;
        const TableInit init = table_init(job.rows, table_of_row);
        store_floats<kWidth>(output + j * dim, source_floats<kWidth, Reader>(job.slab, init, from,
                                                                             id_of_row, column));
      }
      continue;
    }
    struct Row {
      int64_t source;
      typename Reader::template Loaded<kWidth> values;
    };
    stream_rows<kGathered>(
        count,
        [&](int from, bool wanted) {
          Row row{group.broadcast(static_cast<long long>(source), from), {}};
          if (wanted && active && row.source >= 0) {
            row.values = Reader::template load<kWidth>(job.slab, row.source, column);
          }
          return row;
        },
        [&](const Row& row, int j) {
          if (!active || row.source == kElsewhere) return;
          store_floats<kWidth>(output + j * dim, row.source >= 0 ? Reader::template floats<kWidth>(
                                                                       job.slab, row.values)
                                                                 : zero_floats<kWidth>());
        });
  }
}

// The features of one slab.
template <class Reader>
void look_up(const Call& call, const SlabLookup& job, bool aligned, float* out) {
  with_lanes(job.slab.dim, aligned, [&](auto group) {
    using Group = decltype(group);
    if (job.lookup.pooling == kPoolNone) {
      const int most = std::min(group.size(), kGathered);
      const int64_t groups = (job.lookup.features.threads() + most - 1) / most;
      call.launch(gather_rows<Reader, Group>, groups * group.size(), 0, group, job, out);
    } else if (job.bags() > 0) {
      call.launch(pool_bags<Reader, Group>, job.bags() * group.size(), 0, group, job, out);
    }
  });
}

}  // namespace

Tensor run_lookup(const Call& call, const GroupRows& rows, LookupCall lookup) {
  Tensor output = call.empty({lookup.output_rows, lookup.output_columns}, ScalarType::Float);
  Scratch scratch;
  const auto words = scratch.add<int64_t>(static_cast<int64_t>(lookup.words.size()));
  scratch.allocate(call);
  const LookupWords uploaded = upload_lookup(call, &lookup, scratch.get(words));
  auto* out = static_cast<float*>(output.data_ptr());
  for (size_t s = 0; s < rows.slabs.size(); ++s) {
    if (lookup.slab_features[s].empty()) continue;
    const SlabLookup job = slab_lookup(call, rows, lookup, uploaded, s);
    if (is_quantized(job.slab.storage)) {
      look_up<CodeReader>(call, job, lookup.slab_aligned[s], out);
    } else {
      look_up<FloatReader>(call, job, lookup.slab_aligned[s], out);
    }
  }
  return output;
}

namespace {

// Number of updates of the rows, by which the backward detects updates since the forward.
Tensor update_count(const Call& call, const Tensor& row_clock, const Tensor& meta) {
  const int64_t* extra = row_clock_extra(call, row_clock, meta.size(0));
  Tensor count = call.empty({1}, ScalarType::Long);
  call.copy(count.data_ptr(), extra + kRowClockUpdates, 8);
  return count;
}

const char* const kWeights = "weights";

Tensor embedding_inference(std::vector<Tensor> weights, std::vector<Tensor> generations,
                           Tensor meta, Tensor init_data, Tensor ids, Tensor handles,
                           Tensor offsets, std::optional<Tensor> per_sample_weights,
                           std::vector<int64_t> feature_tables, std::vector<int64_t> feature_dims,
                           int64_t pooling, std::vector<int64_t> formats) {
  const Call call("embedding_inference", kWeights, weights.empty() ? meta : weights[0]);
  const GroupRows rows =
      group_rows(row_tensors(call, weights, generations, meta, init_data, formats));
  return run_lookup(call, rows,
                    lookup_call(call, rows, ids, handles, offsets, per_sample_weights,
                                feature_tables, feature_dims, pooling));
}

std::tuple<Tensor, Tensor> read_with_count(
    const char* op, const std::vector<Tensor>& weights, const std::vector<Tensor>& generations,
    const Tensor& row_clock, const Tensor& meta, const Tensor& init_data, const Tensor& ids,
    const Tensor& handles, const Tensor& offsets, const std::optional<Tensor>& per_sample_weights,
    const std::vector<int64_t>& feature_tables, const std::vector<int64_t>& feature_dims,
    int64_t pooling) {
  const Call call(op, kWeights, weights.empty() ? meta : weights[0]);
  const GroupRows rows = group_rows(call, weights, generations, meta, init_data);
  Tensor output = run_lookup(call, rows,
                             lookup_call(call, rows, ids, handles, offsets, per_sample_weights,
                                         feature_tables, feature_dims, pooling));
  return {output, update_count(call, row_clock, meta)};
}

std::tuple<Tensor, Tensor> embedding_forward(std::vector<Tensor> weights,
                                             std::vector<Tensor> generations, Tensor row_clock,
                                             Tensor meta, Tensor init_data, Tensor ids,
                                             Tensor handles, Tensor offsets,
                                             std::optional<Tensor> per_sample_weights,
                                             std::vector<int64_t> feature_tables,
                                             std::vector<int64_t> feature_dims, int64_t pooling) {
  return read_with_count("embedding_forward", weights, generations, row_clock, meta, init_data, ids,
                         handles, offsets, per_sample_weights, feature_tables, feature_dims,
                         pooling);
}

// state, dirty_bits, copy_on_write, hyper, pending, grad_anchor and optimizer are for the autograd
// formula.
std::tuple<Tensor, Tensor> embedding(
    std::vector<Tensor> weights, std::vector<Tensor> generations, std::vector<Tensor> /*state*/,
    std::vector<Tensor> /*dirty_bits*/, std::vector<Tensor> /*copy_on_write*/, Tensor row_clock,
    Tensor /*hyper*/, Tensor meta, Tensor init_data, std::vector<Tensor> /*pending*/, Tensor ids,
    Tensor handles, Tensor offsets, std::optional<Tensor> per_sample_weights,
    Tensor /*grad_anchor*/, std::vector<int64_t> feature_tables, std::vector<int64_t> feature_dims,
    int64_t pooling, int64_t /*optimizer*/) {
  return read_with_count("embedding", weights, generations, row_clock, meta, init_data, ids,
                         handles, offsets, per_sample_weights, feature_tables, feature_dims,
                         pooling);
}

}  // namespace
}  // namespace dynemb::cuda

DYNEMB_IMPLEMENT_OPS(m) {
  m.impl("embedding", TORCH_BOX(&dynemb::cuda::embedding));
  m.impl("embedding_forward", TORCH_BOX(&dynemb::cuda::embedding_forward));
  m.impl("embedding_inference", TORCH_BOX(&dynemb::cuda::embedding_inference));
}
