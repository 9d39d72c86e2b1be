#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_scan.cuh>

#include "core/search.h"
#include "cuda/gradient/runs.h"
#include "cuda/memory/table_memory.h"

namespace dynemb::cuda {
namespace {

// A thread per id: 8 bytes of handle in order (and the offsets, which stay in cache); writes key,
// position and bag. Rows of slab s have keys from base[s] on; ids without a row come last.
template <class Key>
__global__ void make_keys(LookupArgs lookup, RowArgs rows, const int64_t* base, int64_t slabs,
                          ErrorSink errors, Key* keys, uint32_t* positions, uint32_t* bags) {
  const int64_t i = thread_number();
  const FeatureArgs& features = lookup.features;
  const int64_t bag_total = features.features * features.batch;
  if (i < max(bag_total, static_cast<int64_t>(1))) check_offset(features, errors, i);
  if (i >= features.count) return;
  int64_t feature = 0;
  if (bags != nullptr) {
    const int64_t bag = features.bag_of(i);
    bags[i] = static_cast<uint32_t>(bag);
    feature = features.features == 1 ? 0 : bag / features.batch;
  } else {
    feature = features.feature_of(i);
  }
  const int64_t handle = lookup.handles[i];
  int64_t slab = lookup.slab[feature];
  bool known = true;
  if (slab < 0) {
    const int64_t* meta = rows.meta + features.table[feature] * kMetaColumns;
    known = meta[kMetaDim] == -slab;
    slab = known ? meta[kMetaSlab] : 0;
    if (!known) errors.report(kErrorFeatureDim, feature);
  }
  int64_t key = base[slabs];
  if (handle >= 0 && known) {
    const int64_t row = handle_row(handle);
    if (row < base[slab + 1] - base[slab]) {
      key = base[slab] + row;
    } else {
      errors.report(kErrorHandle, row);
    }
  }
  keys[i] = static_cast<Key>(key);
  positions[i] = static_cast<uint32_t>(i);
}

// A thread per bag: the ids' weights, summed in order, 4 to 12 bytes each.
__global__ void scale_bags(LookupArgs lookup, MeanDivisor* divisor) {
  const FeatureArgs& features = lookup.features;
  const int64_t bag = thread_number();
  if (bag >= features.features * features.batch) return;
  const int64_t end = features.offset(bag + 1);
  float sum = 0.0f;
  for (int64_t i = features.offset(bag); i < end; ++i) {
    if (lookup.handles[i] == kPaddingHandle) continue;
    sum += lookup.id_weights == nullptr ? 1.0f : lookup.id_weights[i];
  }
  divisor[bag] = mean_divisor(sum);
}

// A thread per occurrence: 1 where a run begins. Reads a key twice (once from cache), writes 4
// bytes.
template <class Key>
__global__ void flag_heads(const Key* keys, int64_t count, Key missing, int32_t* flags) {
  const int64_t i = thread_number();
  if (i >= count) return;
  flags[i] = keys[i] != missing && (i == 0 || keys[i] != keys[i - 1]) ? 1 : 0;
}

// A thread per occurrence: `number` holds the inclusive sums of the flags.
template <class Key>
__global__ void write_runs(const Key* keys, const int32_t* number, int64_t count, Key missing,
                           int32_t* begin, int64_t* head) {
  const int64_t i = thread_number();
  if (i >= count || keys[i] == missing) return;
  if (i == 0 || keys[i] != keys[i - 1]) begin[number[i] - 1] = static_cast<int32_t>(i);
  if (i + 1 == count || keys[i + 1] == missing) {
    begin[number[i]] = static_cast<int32_t>(i + 1);
    head[kRunCount] = number[i];
  }
}

// A thread per slab: its first run, by binary search.
template <class Key>
__global__ void find_slabs(const Key* keys, const int32_t* begin, const int64_t* base,
                           int64_t slabs, const int64_t* head, int64_t* slab_first) {
  const int64_t s = thread_number();
  if (s > slabs) return;
  slab_first[s] = first_where(head[kRunCount], [&](int64_t run) {
    return static_cast<int64_t>(keys[begin[run]]) >= base[s];
  });
}

// A thread per run; long ones are cut into pieces. A warp appends to their list together, because
// one id may fill the batch. The position of a run's pieces in the list depends on the order of the
// threads; the sums do not.
__global__ void cut_runs(const int32_t* begin, int64_t* head, int32_t* piece, int32_t* piece_run,
                         int32_t* piece_from) {
  const int64_t runs = head[kRunCount];
  const int lane = static_cast<int>(threadIdx.x) & 31;
  for (int64_t base = thread_number() - lane; base < runs; base += thread_total()) {
    const int64_t r = base + lane;
    int pieces = 0;
    int first = -1;
    if (r < runs) {
      const int64_t length = begin[r + 1] - begin[r];
      if (length > kPieceLength) {
        pieces = static_cast<int>((length + kPieceLength - 1) / kPieceLength);
        first = static_cast<int>(atomicAdd(reinterpret_cast<unsigned long long*>(head + kRunPieces),
                                           static_cast<unsigned long long>(pieces)));
      }
      piece[r] = first;
    }
    for (unsigned cut = __ballot_sync(0xffffffffu, pieces > 0); cut != 0; cut &= cut - 1) {
      const int from = __ffs(static_cast<int>(cut)) - 1;
      const int count = __shfl_sync(0xffffffffu, pieces, from);
      const int to = __shfl_sync(0xffffffffu, first, from);
      for (int p = lane; p < count; p += 32) {
        piece_run[to + p] = static_cast<int32_t>(base + from);
        piece_from[to + p] = static_cast<int32_t>(begin[base + from] + p * kPieceLength);
      }
    }
  }
}

// A group of lanes per piece: kPieceLength random gradients of 4 * dim bytes.
template <class Group>
__global__ void sum_pieces(Group group, GradientArgs args, GradientRuns runs, int64_t slab,
                           int64_t dim) {
  constexpr int kWidth = Group::kWidth;
  const int64_t pieces = *runs.piece_count;
  for (int64_t p = group.number(); p < pieces; p += group.total()) {
    const int64_t run = runs.piece_run[p];
    if (run < runs.slab_first[slab] || run >= runs.slab_first[slab + 1]) continue;
    const int64_t from = runs.piece_from[p];
    const int64_t end = min(from + kPieceLength, static_cast<int64_t>(runs.begin[run + 1]));
    for (int64_t first = 0; first < dim; first += group.stride()) {
      const int64_t column = group.column(first);
      const Floats<kWidth> sum =
          sum_occurrences<1>(group, args, runs.positions, from, end, column, dim);
      if (column < dim) store_floats<kWidth>(runs.piece_sums + p * runs.piece_width + column, sum);
    }
  }
}

// A warp per 32 columns of a run that was cut: adds its pieces in order, so that the bits are those
// of one thread, with many loads in flight. The first piece then holds the sum of the run. Per
// piece 8 bytes to find the first ones, and 4 * dim bytes.
__global__ void add_pieces(GradientRuns runs, int64_t slab, int64_t dim) {
  constexpr int kInFlight = 32;
  const int64_t blocks = (dim + 31) / 32;
  const int64_t work = *runs.piece_count * blocks;
  for (int64_t w = thread_number() / 32; w < work; w += thread_total() / 32) {
    const int64_t p = w / blocks;
    const int64_t run = runs.piece_run[p];
    if (runs.piece[run] != p) continue;
    if (run < runs.slab_first[slab] || run >= runs.slab_first[slab + 1]) continue;
    const int64_t column = w % blocks * 32 + (static_cast<int64_t>(threadIdx.x) & 31);
    if (column >= dim) continue;
    const int64_t length = runs.begin[run + 1] - runs.begin[run];
    const int64_t pieces = (length + kPieceLength - 1) / kPieceLength;
    float* sums = runs.piece_sums + p * runs.piece_width + column;
    float sum = sums[0];
    for (int64_t q = 1; q < pieces; q += kInFlight) {
      float part[kInFlight];
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        part[u] = q + u < pieces ? sums[(q + u) * runs.piece_width] : 0.0f;
      }
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        if (q + u < pieces) sum += part[u];
      }
    }
    sums[0] = sum;
  }
}

}  // namespace

int bits_for(int64_t values) {
  int bits = 1;
  while (bits < 63 && (int64_t{1} << bits) < values) ++bits;
  return bits;
}

GradientSort::GradientSort(const Call& call, const GroupRows& rows, LookupCall* lookup,
                           const Tensor& gradient) {
  args_.gradient = output_gradient(call, gradient, lookup->output_rows, lookup->output_columns);
  const FeatureArgs& features = lookup->args.features;
  const int64_t count = features.count;
  const auto slabs = static_cast<int64_t>(rows.slabs.size());
  const bool pooled = lookup->args.pooling != kPoolNone;
  const int64_t bags = features.features * features.batch;
  DYNEMB_CHECK(bags < (int64_t{1} << 32), "dynemb::", call.op, ": ", bags,
               " bags, expected fewer than 2^32: split the batch");
  std::vector<int64_t> base{0};
  int64_t width = 1;
  for (const SlabRows& slab : rows.slabs) {
    base.push_back(base.back() + row_bound(call, slab.generations, slab.rows));
    width = std::max(width, slab.dim);
  }
  width = (width + 3) / 4 * 4;
  const int64_t most_pieces = count / (kPieceLength / 2) + 1;
  const auto words = scratch_.add<int64_t>(static_cast<int64_t>(lookup->words.size()));
  base_part_ = scratch_.add<int64_t>(slabs + 1);
  slab_first_part_ = scratch_.add<int64_t>(slabs + 1);
  begin_part_ = scratch_.add<int32_t>(count + 1);
  piece_part_ = scratch_.add<int32_t>(count);
  piece_run_part_ = scratch_.add<int32_t>(most_pieces);
  piece_from_part_ = scratch_.add<int32_t>(most_pieces);
  head_part_ = scratch_.add<int64_t>(kRunHeadWords);
  bag_part_ = scratch_.add<uint32_t>(pooled ? count : 0);
  position_part_ = scratch_.add<uint32_t>(count);
  const auto divisor_part = scratch_.add<MeanDivisor>(lookup->args.pooling == kPoolMean ? bags : 0);
  const auto sums_part = scratch_.add<float>(most_pieces * width);
  scratch_.allocate(call);
  upload_lookup(call, lookup, scratch_.get(words));
  upload_words(call, base, scratch_.get(base_part_));
  call.fill(scratch_.get(head_part_), 0, kRunHeadWords * 8);
  args_.bag = pooled ? scratch_.get(bag_part_) : nullptr;
  args_.divisor = nullptr;
  args_.lookup = lookup->args;
  if (lookup->args.pooling == kPoolMean && bags > 0) {
    MeanDivisor* divisor = scratch_.get(divisor_part);
    call.launch(scale_bags, bags, 0, lookup->args, divisor);
    args_.divisor = divisor;
  }
  runs_ = {scratch_.get(position_part_),
           scratch_.get(begin_part_),
           scratch_.get(slab_first_part_),
           scratch_.get(piece_part_),
           scratch_.get(piece_run_part_),
           scratch_.get(piece_from_part_),
           scratch_.get(head_part_) + kRunPieces,
           scratch_.get(sums_part),
           width};
  const bool aligned = is_aligned(args_.gradient);
  for (size_t s = 0; s < rows.slabs.size(); ++s) {
    aligned_.push_back(lookup->slab_aligned[s] && aligned);
  }
  if (count == 0) {
    call.fill(scratch_.get(slab_first_part_), 0, (slabs + 1) * 8);
    return;
  }
  const int bits = bits_for(base.back() + 1);
  if (bits <= 32) {
    sort<uint32_t>(call, rows, *lookup, base.back(), bits);
  } else {
    sort<uint64_t>(call, rows, *lookup, base.back(), bits);
  }
  call.launch_strided(cut_runs, count, scratch_.get(begin_part_), scratch_.get(head_part_),
                      scratch_.get(piece_part_), scratch_.get(piece_run_part_),
                      scratch_.get(piece_from_part_));
  if (count > kPieceLength) {
    for (size_t s = 0; s < rows.slabs.size(); ++s) {
      if (lookup->slab_features[s].empty()) continue;
      with_lanes(rows.slabs[s].dim, aligned_[s], [&](auto group) {
        call.launch_strided(sum_pieces<decltype(group)>, most_pieces * group.size(), group, args_,
                            runs_, static_cast<int64_t>(s), rows.slabs[s].dim);
      });
      call.launch_strided(add_pieces, most_pieces * ((rows.slabs[s].dim + 31) / 32) * 32, runs_,
                          static_cast<int64_t>(s), rows.slabs[s].dim);
    }
  }
}

template <class Key>
RunSort<Key>::RunSort(const Call& call, int64_t count, int bits) : count_(count), bits_(bits) {
  const auto items = static_cast<int>(count);
  check_cuda(call.op, "sorting rows",
             cub::DeviceRadixSort::SortPairs(
                 nullptr, sort_bytes_, static_cast<const Key*>(nullptr), static_cast<Key*>(nullptr),
                 static_cast<const uint32_t*>(nullptr), static_cast<uint32_t*>(nullptr), items, 0,
                 bits, call.stream));
  check_cuda(
      call.op, "numbering rows",
      cub::DeviceScan::InclusiveSum(nullptr, scan_bytes_, static_cast<const int32_t*>(nullptr),
                                    static_cast<int32_t*>(nullptr), items, call.stream));
  key_part_ = scratch_.add<Key>(count);
  sorted_part_ = scratch_.add<Key>(count);
  unsorted_part_ = scratch_.add<uint32_t>(count);
  flag_part_ = scratch_.add<int32_t>(count);
  number_part_ = scratch_.add<int32_t>(count);
  temporary_part_ = scratch_.add<char>(static_cast<int64_t>(std::max(sort_bytes_, scan_bytes_)));
  scratch_.allocate(call);
}

// cub sorts stably, so occurrences of a row stay in order. Its passes read and write 4 +
// sizeof(Key) bytes a position for every 8 bits of the highest key.
template <class Key>
void RunSort<Key>::find(const Call& call, Key missing, uint32_t* positions, int32_t* begin,
                        int64_t* head) const {
  const auto items = static_cast<int>(count_);
  Key* sorted = scratch_.get(sorted_part_);
  int32_t* flags = scratch_.get(flag_part_);
  int32_t* number = scratch_.get(number_part_);
  char* temporary = scratch_.get(temporary_part_);
  size_t sort_bytes = sort_bytes_;
  size_t scan_bytes = scan_bytes_;
  check_cuda(call.op, "sorting rows",
             cub::DeviceRadixSort::SortPairs(temporary, sort_bytes, static_cast<const Key*>(keys()),
                                             sorted, static_cast<const uint32_t*>(unsorted()),
                                             positions, items, 0, bits_, call.stream));
  call.launch(flag_heads<Key>, count_, 0, sorted, count_, missing, flags);
  check_cuda(
      call.op, "numbering rows",
      cub::DeviceScan::InclusiveSum(temporary, scan_bytes, static_cast<const int32_t*>(flags),
                                    number, items, call.stream));
  call.launch(write_runs<Key>, count_, 0, sorted, number, count_, missing, begin, head);
}

template class RunSort<uint32_t>;
template class RunSort<uint64_t>;

template <class Key>
void GradientSort::sort(const Call& call, const GroupRows& rows, const LookupCall& lookup,
                        int64_t total_rows, int bits) {
  const auto slabs = static_cast<int64_t>(rows.slabs.size());
  // its memory may be freed as soon as the kernels are in the stream
  const RunSort<Key> runs(call, lookup.args.features.count, bits);
  const int64_t* base = scratch_.get(base_part_);
  auto* bags = args_.bag == nullptr ? nullptr : scratch_.get(bag_part_);
  const int64_t threads = lookup.args.features.threads();
  call.launch(make_keys<Key>, threads, 0, lookup.args, rows.args, base, slabs, error_sink(call),
              runs.keys(), runs.unsorted(), bags);
  runs.find(call, static_cast<Key>(total_rows), scratch_.get(position_part_),
            scratch_.get(begin_part_), scratch_.get(head_part_));
  call.launch(find_slabs<Key>, slabs + 1, 32, runs.sorted(), scratch_.get(begin_part_), base, slabs,
              scratch_.get(head_part_), scratch_.get(slab_first_part_));
}

}  // namespace dynemb::cuda
