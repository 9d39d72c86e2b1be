// ids_partition: the distinct ids of groups, sorted by the part that owns them.
#include <torch/csrc/stable/ops.h>

#include <cub/device/device_radix_sort.cuh>

#include "core/features/routing.h"
#include "core/search.h"
#include "cuda/features/lists.h"
#include "cuda/routing/unique.h"

namespace dynemb::cuda {
namespace {

struct PartitionJob {
  UniqueResults unique;
  int64_t count;  // ids given
  int64_t groups;
  int64_t parts;
  SlotRanges ranges;
  uint32_t* keys;  // [N] owner * groups + group of a distinct id; parts * groups beyond them
  int32_t* numbers;
  uint32_t* sorted_keys;
  int32_t* sorted_numbers;
  int32_t* place;  // [N] place of a distinct id
  int64_t* ids;    // results
  int64_t* counts;
  int64_t* inverse;
  int64_t* lengths;

  __device__ __forceinline__ int64_t found() const { return unique.offsets[groups]; }
};

// A thread per id given: 8 bytes in order for a distinct one, and 8 written.
__global__ void make_partition_keys(PartitionJob job) {
  const int64_t i = thread_number();
  if (i >= job.count) return;
  auto key = static_cast<uint64_t>(job.parts * job.groups);
  if (i < job.found()) {
    const int64_t group = part_of(job.unique.offsets, job.groups, i);
    const uint64_t owner = owner_of(static_cast<uint64_t>(job.unique.ids[i]), job.ranges);
    key = owner * static_cast<uint64_t>(job.groups) + static_cast<uint64_t>(group);
  }
  job.keys[i] = static_cast<uint32_t>(key);
  job.numbers[i] = static_cast<int32_t>(i);
}

// A thread per id given: 4 bytes in order, 20 at random, 16 in order.
__global__ void move_unique(PartitionJob job) {
  const int64_t to = thread_number();
  if (to >= job.count) return;
  const int32_t from = job.sorted_numbers[to];
  job.place[from] = static_cast<int32_t>(to);
  job.ids[to] = job.unique.ids[from];
  job.counts[to] = job.unique.counts[from];
}

// The first place with a key of at least `key`.
__device__ __forceinline__ int64_t first_of_key(const PartitionJob& job, int64_t key) {
  return first_where(job.count, [&](int64_t place) {
    return static_cast<int64_t>(job.sorted_keys[place]) >= key;
  });
}

// A thread per id given or key: 8 bytes in order, 4 at random, 8 in order; two searches for a key.
__global__ void finish_partition(PartitionJob job) {
  const int64_t i = thread_number();
  if (i < job.parts * job.groups) job.lengths[i] = first_of_key(job, i + 1) - first_of_key(job, i);
  if (i < job.count) job.inverse[i] = job.place[job.unique.inverse[i]];
}

cudaError_t sort_keys(void* temporary, size_t& bytes, const PartitionJob& job, int bits,
                      cudaStream_t stream) {
  return cub::DeviceRadixSort::SortPairs(temporary, bytes, static_cast<const uint32_t*>(job.keys),
                                         job.sorted_keys, static_cast<const int32_t*>(job.numbers),
                                         job.sorted_numbers, static_cast<int>(job.count), 0, bits,
                                         stream);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> ids_partition(Tensor ids, Tensor offsets, int64_t parts,
                                                         int64_t slots) {
  const Call call("ids_partition", "ids", ids);
  check_slots(call.op, parts, slots);
  const GroupedIds given = grouped_ids(call, ids, offsets);
  DYNEMB_CHECK(given.groups == 0 || parts <= INT32_MAX / given.groups, "dynemb::", call.op,
               ": there are ", given.groups, " groups and ", parts,
               " parts, expected a product of at most ", INT32_MAX);
  const int64_t count = given.count;
  Tensor owned = call.empty({count}, ScalarType::Long);
  Tensor counts = call.empty({count}, ScalarType::Long);
  Tensor inverse = call.empty({count}, ScalarType::Long);
  Tensor lengths = call.empty({parts, given.groups}, ScalarType::Long);

  PartitionJob job{};
  job.count = count;
  job.groups = given.groups;
  job.parts = parts;
  job.ranges = make_slot_ranges(static_cast<uint64_t>(parts), static_cast<uint64_t>(slots));
  job.ids = static_cast<int64_t*>(owned.data_ptr());
  job.counts = static_cast<int64_t*>(counts.data_ptr());
  job.inverse = static_cast<int64_t*>(inverse.data_ptr());
  job.lengths = static_cast<int64_t*>(lengths.data_ptr());
  int bits = 1;
  while ((parts * given.groups) >> bits != 0) ++bits;
  size_t sort_bytes = 0;
  check_cuda(call.op, "sorting ids", sort_keys(nullptr, sort_bytes, job, bits, call.stream));
  Scratch scratch;
  const auto unique_ids = scratch.add<int64_t>(count);
  const auto unique_offsets = scratch.add<int64_t>(given.groups + 1);
  const auto unique_inverse = scratch.add<int64_t>(count);
  const auto unique_counts = scratch.add<int64_t>(count);
  const auto keys = scratch.add<uint32_t>(count);
  const auto sorted_keys = scratch.add<uint32_t>(count);
  const auto numbers = scratch.add<int32_t>(count);
  const auto sorted_numbers = scratch.add<int32_t>(count);
  const auto place = scratch.add<int32_t>(count);
  const auto temporary = scratch.add<char>(static_cast<int64_t>(sort_bytes));
  scratch.allocate(call);
  job.unique = {scratch.get(unique_ids), scratch.get(unique_offsets), scratch.get(unique_inverse),
                scratch.get(unique_counts)};
  job.keys = scratch.get(keys);
  job.sorted_keys = scratch.get(sorted_keys);
  job.numbers = scratch.get(numbers);
  job.sorted_numbers = scratch.get(sorted_numbers);
  job.place = scratch.get(place);

  find_unique(call, given, job.unique);
  if (count > 0) {
    call.launch(make_partition_keys, count, 0, job);
    check_cuda(call.op, "sorting ids",
               sort_keys(scratch.get(temporary), sort_bytes, job, bits, call.stream));
    call.launch(move_unique, count, 0, job);
  }
  call.launch(finish_partition, std::max(count, parts * given.groups), 0, job);
  const int64_t found =
      read_word(call, job.unique.offsets + given.groups, "take ids_partition out of it");
  return {torch::stable::narrow(owned, 0, 0, found), lengths, inverse,
          torch::stable::narrow(counts, 0, 0, found)};
}

}  // namespace
}  // namespace dynemb::cuda

DYNEMB_IMPLEMENT_OPS(m) { m.impl("ids_partition", TORCH_BOX(&dynemb::cuda::ids_partition)); }
