// unique_ids: the distinct ids of groups, in order of first occurrence. A
// scratch hash table finds equal ids, and its slots hold the least position; prefix sums over first
// occurrences number the ids.
#include <torch/csrc/stable/ops.h>

#include <cub/device/device_scan.cuh>
#include <string>

#include "core/index/hash.h"
#include "cuda/features/lists.h"
#include "cuda/index/args.h"
#include "cuda/routing/unique.h"

namespace dynemb::cuda {
namespace {

struct UniqueJob {
  GroupedIds given;
  UniqueResults results;
  DedupeTable dedupe;
  int64_t* slot;    // [N] of an id
  int32_t* number;  // [N + 1] first occurrences before a position
  ErrorSink errors;

  __device__ __forceinline__ int64_t group_of(int64_t position) const {
    return given.groups <= 1 ? 0 : part_of(given.offsets, given.groups, position);
  }
};

// A thread per id: 8 bytes in order, a slot of 4 and the id that it names at random, atomics for a
// position that is the least so far. Also checks the offsets.
__global__ void meet_ids(UniqueJob job) {
  const int64_t i = thread_number();
  check_offset(job.given.offsets, job.given.groups, job.given.count, i, job.errors);
  if (i >= job.given.count) return;
  const int64_t id = job.given.ids[i];
  const int64_t group = job.group_of(i);
  // groups may have the same ids: without a factor, those of adjacent groups would be adjacent
  const uint64_t hash =
      fmix64(static_cast<uint64_t>(id) ^ (static_cast<uint64_t>(group) * 0x9e3779b97f4a7c15ULL));
  job.slot[i] = job.dedupe.insert(hash, i, [&](int32_t other) {
    return job.given.ids[other] == id && job.group_of(other) == group;
  });
}

// A thread per id and one more: 8 bytes in order, 4 at random.
__global__ void flag_firsts(UniqueJob job) {
  const int64_t i = thread_number();
  if (i > job.given.count) return;
  job.number[i] = i < job.given.count && job.dedupe.is_first(job.slot[i], i) ? 1 : 0;
}

// A thread per id or offset: 8 bytes in order, 8 at random, and an atomic to count the id.
__global__ void write_unique(UniqueJob job) {
  const int64_t i = thread_number();
  const int64_t count = job.given.count;
  if (i <= job.given.groups) {
    job.results.offsets[i] = job.number[clipped_offset(job.given.offsets[i], count)];
  }
  if (i >= count) return;
  const int32_t first = job.dedupe.slots[job.slot[i]];
  const int32_t number = job.number[first];
  job.results.inverse[i] = number;
  if (first == i) job.results.ids[number] = job.given.ids[i];
  atomicAdd(reinterpret_cast<unsigned long long*>(job.results.counts + number), 1ULL);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> unique_ids(Tensor ids, Tensor offsets, bool padded) {
  const Call call("unique_ids", "ids", ids);
  const GroupedIds given = grouped_ids(call, ids, offsets);
  const auto words = [&](int64_t count) { return call.empty({count}, ScalarType::Long); };
  Tensor distinct = words(given.count);
  Tensor begins = words(given.groups + 1);
  Tensor inverse = words(given.count);
  Tensor counts = words(given.count);
  const auto* found = static_cast<const int64_t*>(begins.data_ptr()) + given.groups;
  find_unique(
      call, given,
      {static_cast<int64_t*>(distinct.data_ptr()), static_cast<int64_t*>(begins.data_ptr()),
       static_cast<int64_t*>(inverse.data_ptr()), static_cast<int64_t*>(counts.data_ptr())});
  if (padded) return {distinct, begins, inverse, counts};
  const int64_t count = read_word(call, found, "give padded=True");
  return {torch::stable::narrow(distinct, 0, 0, count), begins, inverse,
          torch::stable::narrow(counts, 0, 0, count)};
}

}  // namespace

GroupedIds grouped_ids(const Call& call, const Tensor& ids, const Tensor& offsets) {
  const GroupedIds given = grouped_tensors(call, ids, offsets);
  DYNEMB_CHECK(given.count < INT32_MAX, "dynemb::", call.op, ": ids has ", given.count,
               " elements, expected less than ", INT32_MAX, ": split the batch");
  return given;
}

void find_unique(const Call& call, const GroupedIds& given, const UniqueResults& results) {
  const int64_t slots = dedupe_slots(given.count);
  const auto items = static_cast<int>(given.count + 1);
  size_t scan_bytes = 0;
  check_cuda(call.op, "numbering ids",
             cub::DeviceScan::ExclusiveSum(nullptr, scan_bytes, static_cast<int32_t*>(nullptr),
                                           static_cast<int32_t*>(nullptr), items, call.stream));
  Scratch scratch;
  const auto slots_part = scratch.add<int32_t>(slots);
  const auto slot_part = scratch.add<int64_t>(given.count);
  const auto flag_part = scratch.add<int32_t>(given.count + 1);
  const auto scan_part = scratch.add<char>(static_cast<int64_t>(scan_bytes));
  scratch.allocate(call);
  const UniqueJob job{given,
                      results,
                      empty_dedupe_table(call, scratch.get(slots_part), slots),
                      scratch.get(slot_part),
                      scratch.get(flag_part),
                      error_sink(call)};
  call.fill(results.ids, 0, given.count * 8);
  call.fill(results.counts, 0, given.count * 8);
  const int64_t threads = std::max(given.count, given.groups) + 1;
  call.launch(meet_ids, threads, 0, job);
  call.launch(flag_firsts, given.count + 1, 0, job);
  check_cuda(call.op, "numbering ids",
             cub::DeviceScan::ExclusiveSum(scratch.get(scan_part), scan_bytes, job.number,
                                           job.number, items, call.stream));
  call.launch(write_unique, threads, 0, job);
}

int64_t read_word(const Call& call, const int64_t* word, const char* instead) {
  DYNEMB_CHECK(!call.capturing(), "dynemb::", call.op,
               ": the host has to wait for the number of distinct ids, which it cannot while a "
               "graph is captured: ",
               instead);
  return call.read("reading a number", word, 1)[0];
}

}  // namespace dynemb::cuda

DYNEMB_IMPLEMENT_OPS(m) { m.impl("unique_ids", TORCH_BOX(&dynemb::cuda::unique_ids)); }
