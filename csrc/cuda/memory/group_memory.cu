#include <algorithm>
#include <utility>

#include "core/runtime/error_class.h"
#include "cuda/memory/group_memory.h"

namespace dynemb::cuda {
namespace {

// Number of unfinished insertions with reserved memory. If one more would need unmapped memory, the
// host waits until at most this many are left: rows reserved for ids that turn out to be known are
// wasted, and a device with two queued calls is not idle.
constexpr size_t kCallsAhead = 1;

std::vector<int64_t> read(const Call& call, const Tensor& tensor) {
  return call.read("reading the tables' counts", static_cast<const int64_t*>(tensor.data_ptr()),
                   tensor.numel());
}

int64_t shared_word_count(size_t tables, size_t slabs) {
  return kSharedHeadWords + static_cast<int64_t>(tables) * kSharedTableWords +
         static_cast<int64_t>(slabs) * kSharedSlabWords;
}

}  // namespace

GroupMemory::GroupMemory(const Call& call, const IndexArgs& index, std::vector<Growing> tables,
                         std::vector<int64_t> slab_of_table, std::vector<Growing> slabs,
                         std::vector<Growing> pending)
    : device_(call.device),
      words_(call.op, call.device, shared_word_count(tables.size(), slabs.size())),
      host_words_{words_.host(), static_cast<int64_t>(tables.size())},
      device_words_{words_.device(), static_cast<int64_t>(tables.size())},
      reports_(call.op, call.device, index.table_count * kTableColumns,
               index.table_count + kRowClockExtra),
      tables_(host_words_, std::move(tables), std::move(slab_of_table), std::move(slabs)),
      calls_(host_words_.words + kSharedCalls),
      bounds_(host_words_, tables_, calls_),
      headroom_(call, index, host_words_, device_words_, &tables_, &calls_, bounds_),
      pending_(host_words_, std::move(pending)) {}

void GroupMemory::bind(const Call& call, const TableRoom& room, const Tensor& tables,
                       const Tensor& slabs, const Tensor* pending_counts,
                       const std::optional<Tensor>& policy) {
  const std::lock_guard<std::mutex> lock(mutex_);
  bounds_.set_policies(policy.has_value() ? PolicyBounds(read(call, *policy), tables_.table_count())
                                          : PolicyBounds());
  TableRoom needed = room;
  const std::vector<int64_t> table_words = read(call, tables);
  const std::vector<int64_t> slab_words = read(call, slabs);
  for (size_t t = 0; t < tables_.table_count(); ++t) {
    const int64_t* row = table_words.data() + t * kTableColumns;
    volatile int64_t* shared = host_words_.table(static_cast<int64_t>(t));
    needed.buckets[t] = std::max(needed.buckets[t], row[kTableBucketCount]);
    shared[kSharedSize] = row[kTableSize];
    shared[kSharedBucketCount] = row[kTableBucketCount];
    shared[kSharedTombstones] = row[kTableTombstones];
  }
  for (size_t s = 0; s < tables_.slab_count(); ++s) {
    const int64_t next = slab_words[s * kSlabColumns + kSlabNextRow];
    // at least one: copies of empty tables have a row
    needed.rows[s] = std::max({needed.rows[s], next, int64_t{1}});
    host_words_.slab(static_cast<int64_t>(s))[kSharedNextRow] = next;
  }
  calls_.forget();
  reports_.forget();
  tables_.map_or_raise(call, needed, "the table needs");
  tables_.keep();
  if (pending_counts != nullptr) pending_.bind(call, read(call, *pending_counts));
}

void GroupMemory::add_rows(const Call& call, size_t slab, const RowMemory& part) {
  const std::lock_guard<std::mutex> lock(mutex_);
  tables_.add_rows(call, slab, part);
}

void GroupMemory::set_dirty_bits(size_t slab, uint8_t* bits) {
  const std::lock_guard<std::mutex> lock(mutex_);
  dirty_bits_.resize(tables_.slab_count(), nullptr);
  dirty_bits_[slab] = bits;
}

void GroupMemory::split_rows(const Call& call, const std::vector<int64_t>& slabs,
                             std::shared_ptr<RowBudget> budget) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<size_t> numbers;
  for (const int64_t slab : slabs) {
    DYNEMB_CHECK(slab >= 0 && slab < static_cast<int64_t>(tables_.slab_count()),
                 "dynemb::split_rows: slabs has ", slab, ", expected 0 to ",
                 static_cast<int64_t>(tables_.slab_count()) - 1);
    numbers.push_back(static_cast<size_t>(slab));
  }
  DYNEMB_CHECK(tables_.budget() == nullptr, "dynemb::", call.op,
               ": the rows of this group have been split before: call it once");
  tables_.split_rows(numbers, std::move(budget));
}

void GroupMemory::cache_rows(const Call& call, const std::vector<CacheMemory>& caches,
                             std::shared_ptr<RowBudget> budget) {
  const std::lock_guard<std::mutex> lock(mutex_);
  DYNEMB_CHECK(tables_.budget() == nullptr, "dynemb::", call.op,
               ": the rows of this group have a cache or have been split before: call it once");
  tables_.cache_rows(call, caches, std::move(budget));
  order_ = std::make_shared<StreamOrder>(call);
}

int64_t GroupMemory::map_slots(const Call& call, size_t slab, int64_t slots) {
  const std::lock_guard<std::mutex> lock(mutex_);
  tables_.map_slots(call, slab, slots);
  return std::min(slots, tables_.mapped_slots(slab));
}

void GroupMemory::map_first_slots(const Call& call, size_t slab, int64_t slots) {
  const std::lock_guard<std::mutex> lock(mutex_);
  tables_.map_first_slots(call, slab, slots);
}

void GroupMemory::release_slots(const Call& call, size_t slab, int64_t slots) {
  const std::lock_guard<std::mutex> lock(mutex_);
  tables_.release_slots(call, slab, slots);
}

RowBudget::Bytes GroupMemory::split_bytes() const {
  const RowBudget* budget = tables_.budget();
  return budget == nullptr ? RowBudget::Bytes{0, 0} : budget->used();
}

void GroupMemory::release(const Call& call, const TableRoom& room) {
  const std::lock_guard<std::mutex> lock(mutex_);
  DYNEMB_CHECK(
      room.buckets.size() == tables_.table_count() && room.rows.size() == tables_.slab_count(),
      "dynemb::release_group: got ", room.buckets.size(), " table_buckets and ", room.rows.size(),
      " slab_rows for ", tables_.table_count(), " tables and ", tables_.slab_count(), " slabs");
  tables_.release(call, room);
  pending_.release(call);
}

InsertionRoom GroupMemory::prepare_insertion(const Call& call,
                                             const std::vector<int64_t>& feature_tables,
                                             const std::vector<int64_t>& feature_policies,
                                             int64_t ids) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const std::vector<bool> touched = bounds_.touched_tables(feature_tables, feature_policies);
  if (call.capturing()) {
    // on the stream of the headroom, which is not captured
    if (order_ != nullptr) order_->wait(call.on_stream(side_stream(call.op, device_)));
    headroom_.add(call, touched, ids);
    return bounds_.replay_room(touched);
  }
  end_capture();
  calls_.confirm();
  InsertionNeeds needs = bounds_.needs(touched, ids);
  while (!tables_.is_mapped(needs.memory) && calls_.insertions().size() > kCallsAhead &&
         calls_.wait_for_oldest(call)) {
    needs = bounds_.needs(touched, ids);
  }
  tables_.need(needs.memory);
  needs.room.mapped = tables_.map(call, needs.memory);
  needs.room.call_number = calls_.add(ids, touched, bounds_.touched_slabs(touched));
  return needs.room;
}

void GroupMemory::map_exactly(const Call& call, const NewIdCounts& new_ids) {
  const std::lock_guard<std::mutex> lock(mutex_);
  try {
    tables_.map_or_raise(call, bounds_.needs_exactly(new_ids), "the table must grow by");
  } catch (...) {
    calls_.drop_last();
    throw;
  }
}

void GroupMemory::map_buckets(const Call& call, int64_t table, int64_t buckets) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto t = static_cast<size_t>(table);
  const int64_t capacity = tables_.bucket_capacity(t);
  DYNEMB_CHECK(buckets <= capacity, "dynemb::", call.op, ": table ", table, " needs ", buckets,
               " buckets for its ids but has room for ", capacity,
               ": create the table with a larger max_rows, or erase ids", kNoRoomError);
  TableRoom room = tables_.no_room();
  room.buckets[t] = buckets;
  tables_.map_or_raise(call, room, "the index must grow by");
  tables_.keep_buckets(t);
}

void GroupMemory::note_erasure(int64_t ids) {
  const std::lock_guard<std::mutex> lock(mutex_);
  calls_.note_erasure(ids);
}

std::vector<int64_t> GroupMemory::prepare_append(const Call& call, const std::vector<bool>& touched,
                                                 int64_t ids) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!call.capturing()) end_capture();
  return pending_.prepare_append(call, tables_, touched, ids);
}

std::vector<int64_t> GroupMemory::prepare_merge(const Call& call) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!call.capturing()) end_capture();
  return pending_.prepare_merge(call, tables_);
}

std::vector<int64_t> GroupMemory::handle_rows(const Call& call) const {
  return tables_.handle_rows(call.capturing());
}

void GroupMemory::note_applied() {
  const std::lock_guard<std::mutex> lock(mutex_);
  pending_.note_applied();
}

void GroupMemory::end_step(const Call& call, const Tensor& tables, const Tensor& row_clock) {
  const std::lock_guard<std::mutex> lock(mutex_);
  reports_.write(call, tables, row_clock);
  end_capture();
  pending_.end_step();
  calls_.confirm();
  if (headroom_.has_captured()) headroom_.end_step(call);
  tables_.end_step(call, bounds_.held());
}

void GroupMemory::end_capture() {
  headroom_.end_capture();
  pending_.end_capture();
}

}  // namespace dynemb::cuda
