#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "cuda/index/args.h"
#include "cuda/memory/group_memory.h"
#include "cuda/memory/table_memory.h"

namespace dynemb::cuda {
namespace {

std::mutex groups_mutex;
std::map<uintptr_t, std::shared_ptr<GroupMemory>>& groups() {
  static auto* map = new std::map<uintptr_t, std::shared_ptr<GroupMemory>>();
  return *map;
}

// Groups by the handles of the first slab's pending gradients.
std::map<uintptr_t, std::weak_ptr<GroupMemory>>& groups_of_pending() {
  static auto* map = new std::map<uintptr_t, std::weak_ptr<GroupMemory>>();
  return *map;
}
uintptr_t address(const Tensor& tensor) { return reinterpret_cast<uintptr_t>(tensor.data_ptr()); }

std::shared_ptr<GroupMemory> find_group_of_pending(const Tensor& handles) {
  const std::lock_guard<std::mutex> lock(groups_mutex);
  const auto entry = groups_of_pending().find(address(handles));
  return entry == groups_of_pending().end() ? nullptr : entry->second.lock();
}

// Bytes of a row of a tensor with rows in its first dimension.
int64_t bytes_of_row(const Tensor& tensor) {
  auto bytes = static_cast<int64_t>(tensor.element_size());
  for (int64_t d = 1; d < tensor.dim(); ++d) bytes *= tensor.size(d);
  return bytes;
}

RowMemory row_memory(const Call& call, const char* name, const Tensor& tensor, int64_t first_row,
                     int64_t row_bytes) {
  const auto reservation = find_reservation(tensor.data_ptr());
  DYNEMB_CHECK(reservation != nullptr, "dynemb::", call.op, ": ", name,
               " was not made by reserve_cuda, but buckets was: reserve all tensors of a group");
  const int64_t begin = static_cast<char*>(tensor.data_ptr()) - reservation->base();
  return {reservation, begin + first_row * row_bytes, row_bytes};
}

// Registers reserved tensors as a group, maps memory for at least so many buckets and rows, and for
// the content of the tables; waits for the device. Call it again after the counts were written from
// outside.
void bind_group(Tensor buckets, Tensor scores, Tensor tables, Tensor slabs, Tensor free_rows,
                Tensor meta, std::vector<Tensor> weights, std::vector<Tensor> generations,
                std::vector<Tensor> state, std::vector<Tensor> dirty_bits,
                std::vector<Tensor> pending, std::vector<int64_t> table_buckets,
                std::vector<int64_t> slab_rows, std::optional<Tensor> policy) {
  const Call call("bind_group", "buckets", buckets);
  const IndexArgs index = index_args(call, buckets, &scores, tables, meta);
  const auto table_count = static_cast<size_t>(index.table_count);
  const size_t slab_count = weights.size();
  DYNEMB_CHECK(table_buckets.size() == table_count && slab_rows.size() == slab_count &&
                   generations.size() == slab_count && state.size() % slab_count == 0 &&
                   (dirty_bits.empty() || dirty_bits.size() == slab_count) &&
                   (pending.empty() || pending.size() == 4 * slab_count + 1),
               "dynemb::bind_group: got ", table_buckets.size(), " table_buckets, ",
               slab_rows.size(), " slab_rows, ", generations.size(), " generations and ",
               state.size(), " state, ", dirty_bits.size(), " dirty_bits and ", pending.size(),
               " pending tensors for ", table_count, " tables and ", slab_count, " slabs");
  if (policy.has_value()) {
    check_tensor(call, "policy", *policy, ScalarType::Long);
    check_size(call.op, "policy", *policy, 1, kPolicyColumns);
  }
  const auto m =
      call.read("reading meta", static_cast<const int64_t*>(meta.data_ptr()), meta.numel());
  const auto key = reinterpret_cast<uintptr_t>(buckets.data_ptr());
  std::shared_ptr<GroupMemory> group;
  {
    const std::lock_guard<std::mutex> lock(groups_mutex);
    const auto known = groups().find(key);
    if (known != groups().end()) group = known->second;
  }
  if (group == nullptr) {
    std::vector<Growing> growing_tables(table_count);
    std::vector<int64_t> slab_of_table(table_count);
    for (size_t t = 0; t < table_count; ++t) {
      const int64_t begin = m[t * kMetaColumns + kMetaRegionBegin];
      slab_of_table[t] = m[t * kMetaColumns + kMetaSlab];
      growing_tables[t].capacity = m[t * kMetaColumns + kMetaRegionBuckets];
      growing_tables[t].memory.push_back(
          row_memory(call, "buckets", buckets, begin, kBucketWords * 8));
      if (index.scores != nullptr && m[t * kMetaColumns + kMetaUnscored] == 0) {
        growing_tables[t].memory.push_back(
            row_memory(call, "scores", scores, begin, index.score_words * kBucketWidth * 8));
      }
    }
    std::vector<Growing> growing_slabs(slab_count);
    for (size_t s = 0; s < slab_count; ++s) {
      Growing& slab = growing_slabs[s];
      slab.capacity = weights[s].size(0);
      slab.memory.push_back(row_memory(call, "weights", weights[s], 0, bytes_of_row(weights[s])));
      slab.memory.push_back(row_memory(call, "generations", generations[s], 0, 4));
      slab.memory.push_back(
          row_memory(call, "free_rows", free_rows, static_cast<int64_t>(s) * free_rows.size(1), 8));
      for (size_t k = s; k < state.size(); k += slab_count) {
        slab.memory.push_back(row_memory(call, "state", state[k], 0, bytes_of_row(state[k])));
      }
    }
    std::vector<Growing> growing_pending(pending.size() / 4);
    for (size_t s = 0; s < growing_pending.size(); ++s) {
      growing_pending[s].capacity = pending[s].size(0);
      for (size_t k = s; k + 1 < pending.size(); k += slab_count) {
        growing_pending[s].memory.push_back(
            row_memory(call, "pending", pending[k], 0, bytes_of_row(pending[k])));
      }
    }
    group = std::make_shared<GroupMemory>(call, index, std::move(growing_tables),
                                          std::move(slab_of_table), std::move(growing_slabs),
                                          std::move(growing_pending));
  }
  // they may have been added since the last call, and grow with the rows from now on
  for (size_t s = 0; s < dirty_bits.size(); ++s) {
    group->add_rows(call, s, row_memory(call, "dirty_bits", dirty_bits[s], 0, 1));
    group->set_dirty_bits(s, static_cast<uint8_t*>(dirty_bits[s].data_ptr()));
  }
  group->bind(call, {table_buckets, slab_rows}, tables, slabs,
              pending.empty() ? nullptr : &pending.back(), policy);
  const std::lock_guard<std::mutex> lock(groups_mutex);
  groups()[key] = group;
  if (!pending.empty()) groups_of_pending()[address(pending.front())] = group;
}

// Gives back memory of a group beyond so many buckets and rows. Waits for the device.
void release_group(Tensor buckets, std::vector<int64_t> table_buckets,
                   std::vector<int64_t> slab_rows) {
  const Call call("release_group", "buckets", buckets);
  const DeviceWait waited(call.device);
  DYNEMB_CHECK(waited, "dynemb::", call.op,
               ": memory cannot be given back while a stream that tables have used is being "
               "captured, or after the device has failed: call compact() after the capture");
  const auto group = group_memory(call, buckets);
  DYNEMB_CHECK(group != nullptr,
               "dynemb::release_group: buckets was not made by reserve_cuda: its memory cannot "
               "be given back in part");
  group->release(call, {table_buckets, slab_rows});
}

// Lets rows of these slabs lie in host memory beyond `hbm_bytes`, up to `host_bytes`; -1: no bound.
void split_rows(Tensor buckets, std::vector<int64_t> slabs, int64_t hbm_bytes, int64_t host_bytes) {
  const Call call("split_rows", "buckets", buckets);
  DYNEMB_CHECK(hbm_bytes >= 0 && host_bytes >= RowBudget::kNoLimit,
               "dynemb::split_rows: hbm_bytes is ", hbm_bytes, " and host_bytes is ", host_bytes,
               ", expected at least 0, and at least 0 or -1: no bound");
  const auto group = group_memory(call, buckets);
  DYNEMB_CHECK(group != nullptr,
               "dynemb::split_rows: buckets was not made by reserve_cuda: its rows stay where they "
               "are");
  group->split_rows(call, slabs, std::make_shared<RowBudget>(hbm_bytes, host_bytes));
}

// Bytes that are mapped for rows of split slabs: in HBM, in host memory.
std::vector<int64_t> split_bytes(Tensor buckets) {
  const Call call("split_bytes", "buckets", buckets);
  const auto group = group_memory(call, buckets);
  const RowBudget::Bytes bytes = group == nullptr ? RowBudget::Bytes{0, 0} : group->split_bytes();
  return {bytes.hbm, bytes.host};
}

}  // namespace

void forget_group(void* buckets) {
  std::shared_ptr<GroupMemory> ended;
  {
    const std::lock_guard<std::mutex> lock(groups_mutex);
    const auto entry = groups().find(reinterpret_cast<uintptr_t>(buckets));
    if (entry == groups().end()) return;
    ended = std::move(entry->second);
    groups().erase(entry);
    for (auto of = groups_of_pending().begin(); of != groups_of_pending().end();) {
      of = of->second.lock() == ended ? groups_of_pending().erase(of) : std::next(of);
    }
  }
  const int32_t device = ended->device();
  retire(device, std::move(ended));
}

std::shared_ptr<GroupMemory> group_memory(const Call& call, const Tensor& buckets) {
  {
    const std::lock_guard<std::mutex> lock(groups_mutex);
    const auto entry = groups().find(reinterpret_cast<uintptr_t>(buckets.data_ptr()));
    if (entry != groups().end()) return entry->second;
  }
  DYNEMB_CHECK(find_reservation(buckets.data_ptr()) == nullptr, "dynemb::", call.op,
               ": buckets is reserved memory of a group that has not been bound: call bind_group");
  return nullptr;
}

std::shared_ptr<StreamOrder> stream_order(const Tensor& buckets) {
  const std::lock_guard<std::mutex> lock(groups_mutex);
  const auto entry = groups().find(address(buckets));
  return entry == groups().end() ? nullptr : entry->second->order();
}

InsertionRoom prepare_insertion(const Call& call, GroupMemory* group,
                                const std::vector<int64_t>& feature_tables,
                                const std::vector<int64_t>& feature_policies, int64_t ids) {
  return group == nullptr ? InsertionRoom{}
                          : group->prepare_insertion(call, feature_tables, feature_policies, ids);
}

void check_step_is_not_captured(const Call& call) {
  DYNEMB_CHECK(!call.capturing(), "dynemb::", call.op,
               ": the end of a step cannot be captured, because the host makes room for new ids in "
               "it: call optimizer.step() outside of the CUDA graph, after every replay");
}

void end_group_step(const Call& call, const Tensor& buckets, const Tensor& tables,
                    const Tensor& row_clock) {
  drop_retired();
  const auto group = group_memory(call, buckets);
  if (group != nullptr) group->end_step(call, tables, row_clock);
}

void map_exactly(const Call& call, GroupMemory* group, const NewIdCounts& new_ids) {
  group->map_exactly(call, new_ids);
}

void map_buckets(const Call& call, GroupMemory* group, int64_t table, int64_t buckets) {
  if (group != nullptr) group->map_buckets(call, table, buckets);
}

SharedWords shared_words(const GroupMemory* group) {
  return group == nullptr ? SharedWords{} : group->device_words();
}

bool read_reported_counts(const GroupMemory& group, std::vector<int64_t>* tables,
                          std::vector<int64_t>* row_clock) {
  return group.reports().read(tables, row_clock);
}

void note_erasure(GroupMemory* group, int64_t ids) {
  if (group != nullptr) group->note_erasure(ids);
}

std::shared_ptr<GroupMemory> group_of_pending(const Call& call, const Tensor& handles) {
  auto group = find_group_of_pending(handles);
  DYNEMB_CHECK(group != nullptr || find_reservation(handles.data_ptr()) == nullptr,
               "dynemb::", call.op,
               ": pending is reserved memory of a group that has not been bound: call "
               "bind_group");
  return group;
}

std::vector<int64_t> prepare_append(const Call& call, GroupMemory* group,
                                    const std::vector<bool>& touched, int64_t ids) {
  return group->prepare_append(call, touched, ids);
}

std::vector<int64_t> prepare_merge(const Call& call, GroupMemory* group) {
  return group->prepare_merge(call);
}

std::vector<int64_t> handle_rows(const Call& call, const GroupMemory& group) {
  return group.handle_rows(call);
}

void note_applied(const Tensor& handles) {
  const auto group = find_group_of_pending(handles);
  if (group != nullptr) group->note_applied();
}

int64_t row_bound(const Call& call, const void* generations, int64_t rows) {
  if (call.capturing()) return rows;  // replays may come when there are more
  const auto reservation = find_reservation(generations);
  if (reservation == nullptr) return rows;
  const int64_t begin = static_cast<const char*>(generations) - reservation->base();
  return std::min(rows, (reservation->mapped_end() - begin) / 4);
}

}  // namespace dynemb::cuda

DYNEMB_IMPLEMENT_OPS(m) {
  m.impl("bind_group", TORCH_BOX(&dynemb::cuda::bind_group));
  m.impl("split_rows", TORCH_BOX(&dynemb::cuda::split_rows));
  m.impl("split_bytes", TORCH_BOX(&dynemb::cuda::split_bytes));
  m.impl("release_group", TORCH_BOX(&dynemb::cuda::release_group));
}
