// A group of tables in mapped memory: what it holds, what has been mapped, and what comes next.
#pragma once

#include <array>
#include <atomic>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "core/columns.h"
#include "core/index/bucket.h"
#include "cuda/index/count_reports.h"
#include "cuda/index/growth.h"
#include "cuda/index/policy_bounds.h"
#include "cuda/memory/reservation.h"
#include "cuda/memory/table_memory.h"

namespace dynemb::cuda {

// Replays of a captured step that the host may be ahead of what the device has confirmed: each
// takes memory, and a device that has two of them to do is not idle.
constexpr int64_t kReplaysAhead = 2;

// Unfinished insertions that the host is content to reserve memory for. Where one more would need
// memory that is not mapped yet, the host waits until no more are left: rows that calls might need
// but do not are memory that nobody uses, and again a device that has two calls to do is not idle.
constexpr size_t kCallsAhead = 1;

// What calls needed in so many steps stays mapped; more is given back.
constexpr int64_t kStepsToRemember = 64;
// Less than this is not worth giving back.
constexpr int64_t kLeastRelease = int64_t{64} << 20;

// Rows and buckets are mapped beyond the bound by an eighth and at most this many bytes a tensor.
constexpr int64_t kStepBytes = int64_t{64} << 20;

constexpr int64_t kMaxIds = int64_t{1} << 40;  // more than any table has

// Equal parts of a reservation, one for each row (or bucket).
struct RowMemory {
  std::shared_ptr<Reservation> reservation;
  int64_t begin;  // bytes
  int64_t row_bytes;
};

constexpr size_t kGenerationMemory = 1;  // in a slab's Growing::memory

// What grows together: the buckets of a table with their scores, or the rows of a slab with
// generations, state and entries of the free list.
struct Growing {
  std::vector<RowMemory> memory;
  int64_t capacity = 0;
  int64_t mapped = 0;
  int64_t kept = 0;    // not given back: asked for by name, or held when the group was bound
  int64_t needed = 0;  // the most that a call needed in this period of kStepsToRemember steps
  int64_t needed_before = 0;  // and in the one before

  bool map(const char* op, int64_t rows, cudaStream_t stream) {
    rows = std::min(rows, capacity);
    if (rows <= mapped) return true;
    int64_t row_bytes = 1;
    for (const RowMemory& m : memory) row_bytes = std::max(row_bytes, m.row_bytes);
    const int64_t step = std::min(mapped / 8, kStepBytes / row_bytes);
    for (const int64_t target : {std::min(capacity, std::max(rows, mapped + step)), rows}) {
      bool complete = true;
      for (const RowMemory& m : memory) {
        complete = complete && m.reservation->map(op, m.begin + mapped * m.row_bytes,
                                                  (target - mapped) * m.row_bytes, stream);
      }
      if (complete) {
        mapped = target;
        return true;
      }
    }
    return false;
  }
  // Gives memory beyond so many rows back, but for the entry of `memory` at `spared`.
  void release(const char* op, int64_t rows, size_t spared) {
    if (rows >= mapped) return;
    for (size_t i = 0; i < memory.size(); ++i) {
      const RowMemory& m = memory[i];
      if (i == spared) continue;
      m.reservation->unmap(op, m.begin + rows * m.row_bytes, m.begin + capacity * m.row_bytes);
    }
    mapped = rows;
  }
  void need(int64_t rows) { needed = std::max(needed, rows); }
  void keep() { kept = needed = needed_before = mapped; }
  // Rows beyond these have been of no use for a period; `held` are in use now.
  int64_t useful(int64_t held) const {
    const int64_t rows = std::max({held, kept, needed, needed_before, int64_t{1}});
    return std::min(mapped, rows + rows / 8);
  }
  void begin_period() {
    needed_before = needed;
    needed = 0;
  }
  int64_t row_bytes() const {
    int64_t total = 0;
    for (const RowMemory& m : memory) total += m.row_bytes;
    return total;
  }
  int64_t bytes(int64_t rows) const {
    int64_t total = 0;
    for (const RowMemory& m : memory) total += std::max<int64_t>(rows - mapped, 0) * m.row_bytes;
    return total;
  }
};

// Gradients of a slab that wait for the optimizer. What the host knows of them are upper bounds.
struct PendingMemory {
  Growing memory;
  int64_t entries = 0;
  int64_t lookups = 0;       // that appended entries since they were merged
  int64_t captured_now = 0;  // ids of the capture that is going on
  int64_t captured = 0;      // ids that a replay of a captured step may append
};

// What captured calls may bring a table in one replay.
struct CapturedIds {
  int64_t ids = 0;  // if all of the calls' ids are the table's
  int64_t calls = 0;

  void add(int64_t of_call) {
    ids += of_call;
    ++calls;
  }
  void cover(const CapturedIds& other) {
    ids = std::max(ids, other.ids);
    calls = std::max(calls, other.calls);
  }
};

// The most buckets that a table of `ids` ids can have got by growing (decide_growth).
inline int64_t bucket_bound(int64_t ids) {
  const int64_t buckets = buckets_for(ids);
  return round_bucket_count(buckets + (buckets + 3) / 4);
}

class GroupMemory {
 public:
  GroupMemory(const Call& call, const IndexArgs& index, std::vector<Growing> tables,
              std::vector<int64_t> slab_of_table, std::vector<Growing> slabs,
              std::vector<Growing> pending)
      : device_(call.device),
        index_(index),
        tables_(std::move(tables)),
        slab_of_table_(std::move(slab_of_table)),
        slabs_(std::move(slabs)),
        waiting_(pending.size()),
        words_(call.op, call.device,
               kSharedHeadWords + static_cast<int64_t>(tables_.size()) * kSharedTableWords +
                   static_cast<int64_t>(slabs_.size()) * kSharedSlabWords),
        reports_(call.op, call.device, index.table_count * kTableColumns,
                 index.table_count + kRowClockExtra) {
    for (size_t s = 0; s < pending.size(); ++s) waiting_[s].memory = std::move(pending[s]);
    host_ = {words_.host(), static_cast<int64_t>(tables_.size())};
    device_words_ = {words_.device(), host_.table_count};
  }
  ~GroupMemory() {
    const DeviceWait waited(device_);
    for (cudaEvent_t event : step_events_) {
      if (event != nullptr && cudaEventDestroy(event) != cudaSuccess) cudaGetLastError();
    }
  }
  GroupMemory(const GroupMemory&) = delete;

  int32_t device() const { return device_; }
  SharedWords device_words() const { return device_words_; }
  const CountReports& reports() const { return reports_; }

  // Maps at least so much, then reads what the tables hold: waits for the stream.
  void bind(const Call& call, const std::vector<int64_t>& buckets, const std::vector<int64_t>& rows,
            const Tensor& tables, const Tensor& slabs, const Tensor* pending_counts,
            const std::optional<Tensor>& policy) {
    const std::lock_guard<std::mutex> lock(mutex_);
    policies_ =
        policy.has_value() ? PolicyBounds(read(call, *policy), tables_.size()) : PolicyBounds();
    std::vector<int64_t> need_buckets = buckets;
    std::vector<int64_t> need_rows = rows;
    const std::vector<int64_t> table_words = read(call, tables);
    const std::vector<int64_t> slab_words = read(call, slabs);
    for (size_t t = 0; t < tables_.size(); ++t) {
      const int64_t* row = table_words.data() + t * kTableColumns;
      need_buckets[t] = std::max(need_buckets[t], row[kTableBucketCount]);
      host_.table(static_cast<int64_t>(t))[kSharedSize] = row[kTableSize];
      host_.table(static_cast<int64_t>(t))[kSharedBucketCount] = row[kTableBucketCount];
      host_.table(static_cast<int64_t>(t))[kSharedTombstones] = row[kTableTombstones];
    }
    for (size_t s = 0; s < slabs_.size(); ++s) {
      const int64_t next = slab_words[s * kSlabColumns + kSlabNextRow];
      // at least one: copies of empty tables have a row
      need_rows[s] = std::max({need_rows[s], next, int64_t{1}});
      host_.slab(static_cast<int64_t>(s))[kSharedNextRow] = next;
    }
    pending_.clear();
    erasures_.clear();
    reports_.forget();
    map_or_raise(call, need_buckets, need_rows, "the table needs");
    for (Growing& table : tables_) table.keep();
    for (Growing& slab : slabs_) slab.keep();
    if (pending_counts == nullptr) return;
    const std::vector<int64_t> counts = read(call, *pending_counts);
    std::vector<int64_t> need_entries;
    for (size_t s = 0; s < waiting_.size(); ++s) {
      waiting_[s].entries = counts[2 * s];
      waiting_[s].lookups = counts[2 * s + 1];
      need_entries.push_back(std::max<int64_t>(counts[2 * s], 1));
    }
    map_waiting(call, need_entries);
  }

  InsertionRoom prepare(const Call& call, const std::vector<int64_t>& feature_tables,
                        const std::vector<int64_t>& feature_policies, int64_t ids) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const std::vector<bool> touched =
        policies_.touched(tables_.size(), feature_tables, feature_policies);
    if (call.capturing()) {
      for (size_t t = 0; t < touched.size(); ++t) {
        if (touched[t]) captured_now_[t].add(ids);
      }
      captured_ids_now_ += ids;
      make_headroom(call.on_stream(side_stream(call.op, device_)), captured_now_,
                    captured_ids_now_);
      return replay_room(touched);
    }
    end_capture();
    confirm();
    InsertionNeeds needs = needs_of(touched, ids);
    while (!is_mapped(needs) && pending_.size() > kCallsAhead && wait_for_oldest(call)) {
      needs = needs_of(touched, ids);
    }
    for (size_t t = 0; t < tables_.size(); ++t) tables_[t].need(needs.buckets[t]);
    for (size_t s = 0; s < slabs_.size(); ++s) slabs_[s].need(needs.rows[s]);
    needs.room.call_number = ++launched_;
    most_ids_ = std::max(most_ids_, ids);
    needs.room.mapped = map(call, needs.buckets, needs.rows);
    pending_.push_back({needs.room.call_number, ids, touched, touched_slabs(touched)});
    return needs.room;
  }

  void map_exactly(const Call& call, const NewIdCounts& new_ids) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<int64_t> need_buckets(tables_.size(), 0);
    std::vector<int64_t> need_rows(slabs_.size(), 0);
    for (size_t s = 0; s < slabs_.size(); ++s) {
      need_rows[s] = host_.slab(static_cast<int64_t>(s))[kSharedNextRow];
    }
    for (size_t t = 0; t < tables_.size(); ++t) {
      const volatile int64_t* shared = host_.table(static_cast<int64_t>(t));
      const int64_t size = shared[kSharedSize];
      const int64_t added = policies_.size_bound(t, size, new_ids.inserted[t]) - size;
      const GrowthDecision decision =
          decide_growth(shared[kSharedBucketCount], tables_[t].capacity, size,
                        shared[kSharedTombstones], added + new_ids.counted[t]);
      need_buckets[t] = decision.bucket_count;
      need_rows[static_cast<size_t>(slab_of_table_[t])] += added;
    }
    try {
      map_or_raise(call, need_buckets, need_rows, "the table must grow by");
    } catch (...) {
      pending_.pop_back();  // the call ends here
      throw;
    }
  }

  void map_buckets(const Call& call, int64_t table, int64_t buckets) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const int64_t capacity = tables_[static_cast<size_t>(table)].capacity;
    STD_TORCH_CHECK(buckets <= capacity, "dynemb::", call.op, ": table ", table, " needs ", buckets,
                    " buckets for its ids but has room for ", capacity,
                    ": create the table with a larger max_rows, or erase ids");
    std::vector<int64_t> need_buckets(tables_.size(), 0);
    need_buckets[static_cast<size_t>(table)] = buckets;
    map_or_raise(call, need_buckets, std::vector<int64_t>(slabs_.size(), 0),
                 "the index must grow by");
    tables_[static_cast<size_t>(table)].keep();
  }

  // See table_memory.h.
  std::vector<int64_t> prepare_append(const Call& call, const std::vector<bool>& touched,
                                      int64_t ids) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const bool capturing = call.capturing();
    if (!capturing) end_capture();
    applied_ = false;
    std::vector<int64_t> merges(waiting_.size(), 0);
    std::vector<int64_t> need(waiting_.size(), 0);
    for (size_t s = 0; s < waiting_.size(); ++s) {
      if (!touched[s]) continue;
      PendingMemory& waiting = waiting_[s];
      if (capturing) {
        waiting.captured_now += ids;
        need[s] = waiting.entries + (kReplaysAhead + 1) * waiting.captured_now;
        continue;
      }
      count_replays(&waiting);
      // a lookup touches no row twice
      const int64_t added = std::min(ids, slabs_[s].mapped);
      if (waiting.entries + added > waiting.memory.capacity && waiting.lookups > 1) {
        merges[s] = waiting.entries;
        note_merged(s);
      }
      waiting.entries = std::min(waiting.entries + added, waiting.memory.capacity);
      ++waiting.lookups;
      need[s] = waiting.entries;
    }
    map_waiting(call, need);
    return merges;
  }

  std::vector<int64_t> prepare_merge(const Call& call) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const bool capturing = call.capturing();
    if (!capturing) end_capture();
    std::vector<int64_t> bounds;
    for (size_t s = 0; s < waiting_.size(); ++s) {
      PendingMemory& waiting = waiting_[s];
      if (!capturing) count_replays(&waiting);
      // a captured call meets whatever its replays have appended
      bounds.push_back(capturing             ? waiting.memory.mapped
                       : waiting.lookups > 1 ? waiting.entries
                                             : 0);
      if (!capturing) note_merged(s);
    }
    return bounds;
  }

  // Rows that handles of a slab can name.
  std::vector<int64_t> handle_rows(const Call& call) const {
    std::vector<int64_t> rows;
    const bool capturing = call.capturing();
    for (const Growing& slab : slabs_) rows.push_back(capturing ? slab.capacity : slab.mapped);
    return rows;
  }

  void note_applied() {
    const std::lock_guard<std::mutex> lock(mutex_);
    applied_ = true;
  }

  // Gives memory beyond so many buckets and rows back; generations of rows stay, since handles may
  // be out there. Nothing may run on the device; bind() must follow.
  void release(const Call& call, const std::vector<int64_t>& buckets,
               const std::vector<int64_t>& rows) {
    const std::lock_guard<std::mutex> lock(mutex_);
    STD_TORCH_CHECK(buckets.size() == tables_.size() && rows.size() == slabs_.size(),
                    "dynemb::release_group: got ", buckets.size(), " table_buckets and ",
                    rows.size(), " slab_rows for ", tables_.size(), " tables and ", slabs_.size(),
                    " slabs");
    for (size_t t = 0; t < tables_.size(); ++t) {
      tables_[t].release(call.op, std::max<int64_t>(buckets[t], 1), tables_[t].memory.size());
    }
    for (size_t s = 0; s < slabs_.size(); ++s) {
      slabs_[s].release(call.op, std::max<int64_t>(rows[s], 1), kGenerationMemory);
    }
    for (PendingMemory& waiting : waiting_) {
      const int64_t entries = std::max<int64_t>(waiting.entries, 1);
      waiting.memory.release(call.op, entries, waiting.memory.memory.size());
    }
  }

  // The end of a training step: room for the replays that may follow before the host looks again.
  void end_step(const Call& call, const Tensor& tables, const Tensor& row_clock) {
    const std::lock_guard<std::mutex> lock(mutex_);
    reports_.write(call, tables, row_clock);
    end_capture();
    if (applied_) {
      for (PendingMemory& waiting : waiting_) waiting.entries = waiting.lookups = 0;
      applied_ = false;
    }
    if (captured_ids_ == 0) {
      give_back(call);
      return;
    }
    cudaEvent_t& event = step_events_[static_cast<size_t>(steps_++) % step_events_.size()];
    if (event == nullptr) {
      check_cuda(call.op, "creating an event",
                 cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    } else {
      check_cuda(call.op, "waiting for an earlier step", cudaEventSynchronize(event));
    }
    check_cuda(call.op, "recording an event", cudaEventRecord(event, call.stream));
    make_headroom(call, captured_, captured_ids_);
  }

  void note_erasure(int64_t ids) {
    const std::lock_guard<std::mutex> lock(mutex_);
    erasures_.push_back({launched_ + 1, ids});
  }

 private:
  struct Pending {
    int64_t call;
    int64_t ids;
    std::vector<bool> tables;
    std::vector<bool> slabs;
  };

  struct Erasure {
    int64_t before_call;  // the insertion that comes next
    int64_t ids;
  };

  std::vector<int64_t> read(const Call& call, const Tensor& tensor) const {
    std::vector<int64_t> words(static_cast<size_t>(tensor.numel()));
    check_cuda(call.op, "reading the tables' counts",
               cudaMemcpyAsync(words.data(), tensor.data_ptr(), words.size() * 8,
                               cudaMemcpyDeviceToHost, call.stream));
    call.synchronize();
    return words;
  }

  // Erased ids whose tombstones the mirror may not count yet.
  int64_t erased_ids() const {
    int64_t ids = 0;
    for (const Erasure& erasure : erasures_) ids += erasure.ids;
    return ids;
  }

  // What an insertion needs if all its ids, and those of the calls before it, are new.
  struct InsertionNeeds {
    std::vector<int64_t> buckets;
    std::vector<int64_t> rows;
    InsertionRoom room;
  };

  InsertionNeeds needs_of(const std::vector<bool>& touched, int64_t ids) const {
    InsertionNeeds needs{std::vector<int64_t>(tables_.size(), 0),
                         std::vector<int64_t>(slabs_.size(), 0),
                         {true, false, false, 0, 0}};
    std::vector<int64_t> incoming(tables_.size(), 0);
    const std::vector<bool> slabs = touched_slabs(touched);
    for (size_t t = 0; t < tables_.size(); ++t) {
      if (!touched[t]) continue;
      incoming[t] = ids;
      const volatile int64_t* shared = host_.table(static_cast<int64_t>(t));
      const int64_t size = shared[kSharedSize];
      const int64_t pending = pending_ids(t);
      const int64_t count = shared[kSharedBucketCount];
      const int64_t before = policies_.size_bound(t, size, pending);
      const int64_t after = policies_.size_bound(t, size, pending + ids);
      const int64_t most_now =
          pending == 0 ? count
                       : std::min(std::max(count, bucket_bound(before)), tables_[t].capacity);
      needs.buckets[t] = std::max(most_now, bucket_bound(after));
      if (!may_grow(t, pending + ids, pending > 0)) continue;
      needs.room.growth = true;
      needs.room.old_buckets += most_now;
      // the batch is of many tables: this one will hardly get all of it
      needs.room.expected =
          needs.room.expected || may_grow(t, own_pending_ids(t) + own_ids(t, ids), pending > 0);
    }
    for (size_t s = 0; s < slabs_.size(); ++s) {
      if (slabs[s]) needs.rows[s] = rows_needed(s, incoming, ids);
    }
    return needs;
  }

  // Whether an index may grow, or drop its tombstones, in a call after which so many ids have come.
  bool may_grow(size_t t, int64_t incoming, bool calls_before) const {
    const volatile int64_t* shared = host_.table(static_cast<int64_t>(t));
    const int64_t size = shared[kSharedSize];
    const int64_t count = shared[kSharedBucketCount];
    // a new id takes a slot, or leaves a tombstone where it replaces another
    const int64_t tombstones = shared[kSharedTombstones] + erased_ids();
    const bool has_tombstones = tombstones > 0 || (policies_.replaces(t) && calls_before);
    const bool fills =
        (size + incoming + tombstones) * 100 > count * kBucketWidth * kMaxUsedPercent;
    return policies_.size_bound(t, size, incoming) > max_ids(count) || (has_tombstones && fills);
  }

  // Ids of a call that are probably the table's: as many as the most that a call has had of it,
  // where calls are not larger than they were.
  int64_t own_ids(size_t t, int64_t ids) const {
    const int64_t most = host_.table(static_cast<int64_t>(t))[kSharedMostIds];
    if (most == 0 || policies_.counts(t) || most_ids_ == 0) return ids;
    return std::min(ids, most * ((ids + most_ids_ - 1) / most_ids_));
  }
  int64_t own_pending_ids(size_t t) const {
    int64_t ids = 0;
    for (const Pending& p : pending_) ids += p.tables[t] ? own_ids(t, p.ids) : 0;
    return ids;
  }

  bool is_mapped(const InsertionNeeds& needs) const {
    for (size_t t = 0; t < tables_.size(); ++t) {
      if (std::min(needs.buckets[t], tables_[t].capacity) > tables_[t].mapped) return false;
    }
    for (size_t s = 0; s < slabs_.size(); ++s) {
      if (std::min(needs.rows[s], slabs_[s].capacity) > slabs_[s].mapped) return false;
    }
    return true;
  }

  // Waits until the device has done the oldest call. false: the stream is idle without it, because
  // the call failed before it was launched or is on another stream.
  bool wait_for_oldest(const Call& call) {
    const size_t unfinished = pending_.size();
    const RelaxedCapture relaxed(call.op);
    for (bool idle = false;; std::this_thread::yield()) {
      confirm();
      if (pending_.size() < unfinished) return true;
      if (idle) return false;
      const cudaError_t status = cudaStreamQuery(call.stream);
      idle = status == cudaSuccess;  // it may have finished the call just now: look once more
      if (status == cudaErrorNotReady) {
        cudaGetLastError();
      } else {
        check_cuda(call.op, "waiting for an earlier call", status);
      }
    }
  }

  // Gives back what calls have not needed for a while, such as rows for ids that were not new after
  // all. Only where nothing is under way that might take them.
  void give_back(const Call& call) {
    confirm();
    if (++steps_of_period_ >= kStepsToRemember && pending_.empty() && !call.capturing()) {
      steps_of_period_ = 0;
      const auto shrink = [&](Growing* growing, size_t spared, int64_t held,
                              volatile int64_t* limit) {
        const int64_t rows = growing->useful(held);
        if ((growing->mapped - rows) * growing->row_bytes() >= kLeastRelease) {
          *limit = rows;
          growing->release(call.op, rows, spared);
        }
        growing->begin_period();
      };
      for (size_t t = 0; t < tables_.size(); ++t) {
        volatile int64_t* shared = host_.table(static_cast<int64_t>(t));
        shrink(&tables_[t], tables_[t].memory.size(), shared[kSharedBucketCount],
               shared + kSharedBucketLimit);
      }
      for (size_t s = 0; s < slabs_.size(); ++s) {
        volatile int64_t* shared = host_.slab(static_cast<int64_t>(s));
        shrink(&slabs_[s], kGenerationMemory, shared[kSharedNextRow], shared + kSharedRowLimit);
      }
    }
  }

  // Drops the calls that the device has finished.
  void confirm() {
    int64_t finished = host_.words[kSharedCalls];
#if defined(DYNEMB_EMULATED)
    finished -= emulator_calls_behind();
#endif
    std::atomic_thread_fence(std::memory_order_acquire);  // the counts were written before it
    while (!erasures_.empty() && erasures_.front().before_call <= finished) erasures_.pop_front();
    while (!pending_.empty() && pending_.front().call <= finished) pending_.pop_front();
  }
  int64_t pending_ids(size_t table) const {
    int64_t ids = 0;
    for (const Pending& p : pending_) ids += p.tables[table] ? p.ids : 0;
    return ids;
  }

  // The slabs of which tables may take rows.
  std::vector<bool> touched_slabs(const std::vector<bool>& tables) const {
    std::vector<bool> slabs(slabs_.size(), false);
    for (size_t t = 0; t < tables.size(); ++t) {
      if (tables[t] && !policies_.counts(t)) slabs[static_cast<size_t>(slab_of_table_[t])] = true;
    }
    return slabs;
  }

  // Rows of a slab once the pending calls and new ones have been done, if all their ids are new:
  // `incoming` by table, `together` of all tables.
  int64_t rows_needed(size_t slab, const std::vector<int64_t>& incoming, int64_t together) const {
    for (const Pending& p : pending_) together += p.slabs[slab] ? p.ids : 0;
    int64_t added = 0;
    for (size_t t = 0; t < tables_.size(); ++t) {
      if (static_cast<size_t>(slab_of_table_[t]) != slab || policies_.counts(t)) continue;
      const int64_t size = host_.table(static_cast<int64_t>(t))[kSharedSize];
      added += policies_.size_bound(t, size, pending_ids(t) + incoming[t]) - size;
    }
    return host_.slab(static_cast<int64_t>(slab))[kSharedNextRow] + std::min(together, added);
  }

  void end_capture() {
    captured_ids_ = std::max(captured_ids_, captured_ids_now_);
    captured_ids_now_ = 0;
    for (size_t t = 0; t < captured_.size(); ++t) {
      captured_[t].cover(captured_now_[t]);
      captured_now_[t] = {};
    }
    for (PendingMemory& waiting : waiting_) {
      waiting.captured = std::max(waiting.captured, waiting.captured_now);
      waiting.captured_now = 0;
    }
  }

  // Replays may have appended what the host did not see.
  static void count_replays(PendingMemory* waiting) {
    if (waiting->captured == 0) return;
    waiting->entries = std::max(waiting->entries, waiting->memory.mapped);
    waiting->lookups = std::max<int64_t>(waiting->lookups, 2);
  }

  void note_merged(size_t slab) {
    PendingMemory& waiting = waiting_[slab];
    waiting.entries = std::min(waiting.entries, slabs_[slab].mapped);
    waiting.lookups = std::min<int64_t>(waiting.lookups, 1);
  }

  // Maps memory for so many waiting gradients of each slab.
  void map_waiting(const Call& call, const std::vector<int64_t>& entries) {
    bool complete = true;
    int64_t bytes = 0;
    const cudaStream_t stream = side_stream(call.op, device_);
    for (size_t s = 0; s < waiting_.size(); ++s) {
      Growing& memory = waiting_[s].memory;
      const int64_t need = std::min(entries[s], memory.capacity);
      if (need <= memory.mapped) continue;
      const RelaxedCapture relaxed(call.op);
      bytes += memory.bytes(need);
      complete = memory.map(call.op, need, stream) && complete;
    }
    for (size_t s = 0; s < waiting_.size(); ++s) {
      host_.slab(static_cast<int64_t>(s))[kSharedPendingLimit] = waiting_[s].memory.mapped;
    }
    STD_TORCH_CHECK(complete, "dynemb::", call.op,
                    ": out of GPU memory: gradients that wait for optimizer.step() need ",
                    (bytes >> 20) + 1,
                    " MiB more. Call optimizer.step() or zero_grad() more "
                    "often, or torch.cuda.empty_cache()");
  }

  bool map(const Call& call, const std::vector<int64_t>& buckets,
           const std::vector<int64_t>& rows) {
    bool complete = true;
    bool more = false;
    for (size_t t = 0; t < tables_.size(); ++t) more |= buckets[t] > tables_[t].mapped;
    for (size_t s = 0; s < slabs_.size(); ++s) more |= rows[s] > slabs_[s].mapped;
    if (more) {
      const RelaxedCapture relaxed(call.op);
      const cudaStream_t stream = side_stream(call.op, device_);
      for (size_t t = 0; t < tables_.size(); ++t) {
        complete = tables_[t].map(call.op, buckets[t], stream) && complete;
      }
      for (size_t s = 0; s < slabs_.size(); ++s) {
        complete = slabs_[s].map(call.op, rows[s], stream) && complete;
      }
    }
    for (size_t t = 0; t < tables_.size(); ++t) {
      host_.table(static_cast<int64_t>(t))[kSharedBucketLimit] = tables_[t].mapped;
    }
    for (size_t s = 0; s < slabs_.size(); ++s) {
      host_.slab(static_cast<int64_t>(s))[kSharedRowLimit] = slabs_[s].mapped;
    }
    return complete;
  }

  void map_or_raise(const Call& call, const std::vector<int64_t>& buckets,
                    const std::vector<int64_t>& rows, const char* what) {
    if (map(call, buckets, rows)) return;
    int64_t bytes = 0;
    for (size_t t = 0; t < tables_.size(); ++t) {
      bytes += tables_[t].bytes(std::min(buckets[t], tables_[t].capacity));
    }
    for (size_t s = 0; s < slabs_.size(); ++s) {
      bytes += slabs_[s].bytes(std::min(rows[s], slabs_[s].capacity));
    }
    size_t free_bytes = 0;
    size_t total = 0;
    check_cuda(call.op, "asking for free memory", cudaMemGetInfo(&free_bytes, &total));
    STD_TORCH_CHECK(false, "dynemb::", call.op, ": out of GPU memory: ", what, " ",
                    (bytes >> 20) + 1, " MiB, but the device has ", free_bytes >> 20,
                    " MiB left; no id was inserted. Call torch.cuda.empty_cache(), erase ids, or "
                    "use a GPU with more memory");
  }

  // What a captured call must know: replays rehash only tables whose ids replace each other,
  // because their size is known beforehand.
  InsertionRoom replay_room(const std::vector<bool>& touched) const {
    InsertionRoom room{true, false, true, 0, 0};
    for (size_t t = 0; t < tables_.size(); ++t) {
      if (!touched[t] || !policies_.is_bounded(t)) continue;
      const volatile int64_t* shared = host_.table(static_cast<int64_t>(t));
      const int64_t most = policies_.size_bound(t, shared[kSharedSize], kMaxIds);
      const int64_t count = shared[kSharedBucketCount];
      room.growth = true;
      room.old_buckets += std::min(std::max(count, bucket_bound(most)), tables_[t].capacity);
    }
    return room;
  }

  // Ids that a replay probably brings a table.
  int64_t own_captured_ids(size_t t, const CapturedIds& captured) const {
    const int64_t of_call = (captured.ids + captured.calls - 1) / captured.calls;
    return std::min(captured.ids, own_ids(t, of_call) * captured.calls);
  }

  // Memory and buckets for kReplaysAhead + 1 more replays of captured calls: for new ids, and for
  // tombstones where a replay cannot rehash. Each table has room for as many ids of its own as it
  // has had in a call, which all replays together exceed only if several bring it more than ever.
  void make_headroom(const Call& call, const std::vector<CapturedIds>& captured, int64_t ids) {
    confirm();
    std::vector<int64_t> need_buckets(tables_.size(), 0);
    std::vector<int64_t> need_rows(slabs_.size(), 0);
    std::vector<int64_t> wanted(tables_.size(), 0);
    std::vector<int64_t> batches(tables_.size(), 0);
    std::vector<bool> touched(tables_.size(), false);
    for (size_t t = 0; t < tables_.size(); ++t) {
      if (captured[t].calls == 0) continue;
      touched[t] = true;
      batches[t] = (kReplaysAhead + 1) * own_captured_ids(t, captured[t]);
      const volatile int64_t* shared = host_.table(static_cast<int64_t>(t));
      const int64_t count = shared[kSharedBucketCount];
      const int64_t tombstones = shared[kSharedTombstones];
      const int64_t size = shared[kSharedSize];
      const int64_t incoming = pending_ids(t) + batches[t];
      const bool bounded = policies_.is_bounded(t);
      const int64_t most = bounded ? policies_.size_bound(t, size, incoming) : size + incoming;
      const bool fills = (most + tombstones) * 100 > count * kBucketWidth * kMaxUsedPercent;
      const bool compact = !bounded && policies_.replaces(t) && tombstones > 0 && fills;
      wanted[t] = std::min(buckets_for(most), tables_[t].capacity);
      if (wanted[t] <= count) wanted[t] = compact ? count : 0;
      need_buckets[t] = std::max(wanted[t], count);
    }
    const std::vector<bool> slabs = touched_slabs(touched);
    for (size_t s = 0; s < slabs_.size(); ++s) {
      if (slabs[s]) need_rows[s] = rows_needed(s, batches, (kReplaysAhead + 1) * ids);
    }
    map_or_raise(call, need_buckets, need_rows, "room for the replays of a captured step takes");
    const RelaxedCapture relaxed(call.op);
    for (size_t t = 0; t < tables_.size(); ++t) {
      if (wanted[t] > 0) {
        rehash_table(call, index_, device_words_, static_cast<int64_t>(t), wanted[t],
                     Rehash::kCompact, wanted[t]);
        // known at once: the next look must not grow again
        call.synchronize();
      }
    }
  }

  std::mutex mutex_;
  int32_t device_;
  IndexArgs index_;
  std::vector<Growing> tables_;
  std::vector<int64_t> slab_of_table_;
  std::vector<Growing> slabs_;
  std::vector<PendingMemory> waiting_;  // by slab; none: the backward updates the rows
  bool applied_ = false;                // since the last lookup appended gradients
  PinnedWords words_;
  CountReports reports_;
  PolicyBounds policies_;
  SharedWords host_;
  SharedWords device_words_;
  std::deque<Pending> pending_;
  std::deque<Erasure> erasures_;
  int64_t launched_ = 0;
  int64_t most_ids_ = 0;          // of an eager call
  int64_t steps_of_period_ = 0;   // since memory was last given back
  int64_t captured_ids_now_ = 0;  // of the capture that is going on
  int64_t captured_ids_ = 0;      // of a replay
  std::vector<CapturedIds> captured_now_ = std::vector<CapturedIds>(tables_.size());
  std::vector<CapturedIds> captured_ = std::vector<CapturedIds>(tables_.size());
  std::array<cudaEvent_t, kReplaysAhead> step_events_{};
  int64_t steps_ = 0;
};

}  // namespace dynemb::cuda
