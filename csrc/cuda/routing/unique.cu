// unique_ids, unique_ids_padded: the distinct ids of groups, in order of first occurrence. Ids meet
// in a scratch hash table whose slots keep the least position; prefix sums over first occurrences
// number the ids.
#include <cub/cub.cuh>
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
  int32_t* slots;   // -1: free; else the least position of an id
  uint64_t mask;    // slots are a power of two
  int64_t* slot;    // [N] of an id
  int32_t* number;  // [N + 1] first occurrences before a position
  ErrorSink errors;

  __device__ __forceinline__ int64_t group_of(int64_t position) const {
    return given.groups <= 1 ? 0 : part_of(given.offsets, given.groups, position);
  }
  __device__ __forceinline__ void check_offset(int64_t i) const {
    const int64_t* offsets = given.offsets;
    if (i == 0 && offsets[0] != 0) errors.report(kErrorOffsetsStart, offsets[0]);
    if (i == given.groups && offsets[i] != given.count) errors.report(kErrorOffsetsEnd, offsets[i]);
    if (i > 0 && i <= given.groups && offsets[i] < offsets[i - 1]) {
      errors.report(kErrorOffsetsDecrease, i);
    }
  }
};

// A thread per id: 8 bytes in order, a slot of 4 and the id that it names at random, atomics for a
// position that is the least so far. Also checks the offsets.
__global__ void meet_ids(UniqueJob job) {
  const int64_t i = thread_number();
  job.check_offset(i);
  if (i >= job.given.count) return;
  const int64_t id = job.given.ids[i];
  const int64_t group = job.group_of(i);
  const auto mine = static_cast<int32_t>(i);
  // groups may have the same ids: without a factor, those of neighbours would follow one another
  uint64_t slot =
      fmix64(static_cast<uint64_t>(id) ^ (static_cast<uint64_t>(group) * 0x9e3779b97f4a7c15ULL)) &
      job.mask;
  for (;; slot = (slot + 1) & job.mask) {
    int32_t held = job.slots[slot];
    if (held < 0) held = atomicCAS(job.slots + slot, -1, mine);
    if (held < 0) break;
    if (job.given.ids[held] == id && job.group_of(held) == group) {
      if (mine < held) atomicMin(job.slots + slot, mine);
      break;
    }
  }
  job.slot[i] = static_cast<int64_t>(slot);
}

// A thread per id and one more: 8 bytes in order, 4 at random.
__global__ void flag_firsts(UniqueJob job) {
  const int64_t i = thread_number();
  if (i > job.given.count) return;
  job.number[i] = i < job.given.count && job.slots[job.slot[i]] == i ? 1 : 0;
}

// A thread per id or offset: 8 bytes in order, 8 at random, and an atomic to count the id.
__global__ void write_unique(UniqueJob job) {
  const int64_t i = thread_number();
  const int64_t count = job.given.count;
  if (i <= job.given.groups) {
    const int64_t offset = job.given.offsets[i];
    const int64_t begin = offset < 0 ? 0 : (offset > count ? count : offset);
    job.results.offsets[i] = job.number[begin];
  }
  if (i >= count) return;
  const int32_t first = job.slots[job.slot[i]];
  const int32_t number = job.number[first];
  job.results.inverse[i] = number;
  if (first == i) job.results.ids[number] = job.given.ids[i];
  atomicAdd(reinterpret_cast<unsigned long long*>(job.results.counts + number), 1ULL);
}

int64_t slots_for(int64_t count) {
  int64_t slots = 64;
  while (slots < 2 * count) slots *= 2;
  return slots;
}

struct Unique {
  Tensor ids;
  Tensor offsets;
  Tensor inverse;
  Tensor counts;
};

Unique padded(const Call& call, const Tensor& ids, const Tensor& offsets) {
  const GroupedIds given = grouped_ids(call, ids, offsets);
  Unique result{
      call.empty({given.count}, ScalarType::Long), call.empty({given.groups + 1}, ScalarType::Long),
      call.empty({given.count}, ScalarType::Long), call.empty({given.count}, ScalarType::Long)};
  find_unique(call, given,
              {static_cast<int64_t*>(result.ids.data_ptr()),
               static_cast<int64_t*>(result.offsets.data_ptr()),
               static_cast<int64_t*>(result.inverse.data_ptr()),
               static_cast<int64_t*>(result.counts.data_ptr())});
  return result;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> unique_ids_padded(Tensor ids, Tensor offsets) {
  const Call call("unique_ids_padded", "ids", ids);
  Unique unique = padded(call, ids, offsets);
  return {unique.ids, unique.offsets, unique.inverse, unique.counts};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> unique_ids(Tensor ids, Tensor offsets) {
  const Call call("unique_ids", "ids", ids);
  Unique unique = padded(call, ids, offsets);
  const auto* found = static_cast<const int64_t*>(unique.offsets.data_ptr()) + offsets.size(0) - 1;
  const int64_t count = read_word(call, found, "call unique_ids_padded");
  return {torch::stable::narrow(unique.ids, 0, 0, count), unique.offsets, unique.inverse,
          torch::stable::narrow(unique.counts, 0, 0, count)};
}

}  // namespace

GroupedIds grouped_ids(const Call& call, const Tensor& ids, const Tensor& offsets) {
  call.check("ids", ids, ScalarType::Long);
  call.check("offsets", offsets, ScalarType::Long);
  check_words(call.op, "ids", ids);
  check_words(call.op, "offsets", offsets);
  const int64_t groups = offsets.size(0) - 1;
  STD_TORCH_CHECK(groups >= 0, "dynemb::", call.op, ": offsets is empty, expected [groups + 1]");
  STD_TORCH_CHECK(ids.size(0) < INT32_MAX, "dynemb::", call.op, ": ids has ", ids.size(0),
                  " elements, expected less than ", INT32_MAX, ": split the batch");
  return {static_cast<const int64_t*>(ids.data_ptr()), ids.size(0),
          static_cast<const int64_t*>(offsets.data_ptr()), groups};
}

void find_unique(const Call& call, const GroupedIds& given, const UniqueResults& results) {
  const int64_t slots = slots_for(given.count);
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
                      scratch.get(slots_part),
                      static_cast<uint64_t>(slots - 1),
                      scratch.get(slot_part),
                      scratch.get(flag_part),
                      error_sink(call)};
  call.fill(job.slots, -1, slots * 4);
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
  STD_TORCH_CHECK(!call.capturing(), "dynemb::", call.op,
                  ": the host has to wait for the number of distinct ids, which it cannot while a "
                  "graph is captured: ",
                  instead);
  int64_t value = 0;
  check_cuda(call.op, "reading a number",
             cudaMemcpyAsync(&value, word, sizeof(value), cudaMemcpyDeviceToHost, call.stream));
  call.synchronize();
  return value;
}

}  // namespace dynemb::cuda

DYNEMB_IMPLEMENT_OPS(m) {
  m.impl("unique_ids", TORCH_BOX(&dynemb::cuda::unique_ids));
  m.impl("unique_ids_padded", TORCH_BOX(&dynemb::cuda::unique_ids_padded));
}
