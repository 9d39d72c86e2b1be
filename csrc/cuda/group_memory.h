// A group of tables in mapped memory: what it holds, what has been mapped, and what comes next.
#pragma once

#include <array>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <string>

#include "core/bucket.h"
#include "core/columns.h"
#include "cuda/count_reports.h"
#include "cuda/index_growth.h"
#include "cuda/policy_bounds.h"
#include "cuda/reservation.h"
#include "cuda/table_memory.h"

namespace dynemb::cuda {

// Replays of a captured step that the host may be ahead of what the device has confirmed.
constexpr int64_t kReplaysAhead = 8;

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
  // Gives memory beyond so many rows back, but for the entry of `memory` at `kept`.
  void release(const char* op, int64_t rows, size_t kept) {
    if (rows >= mapped) return;
    for (size_t i = 0; i < memory.size(); ++i) {
      const RowMemory& m = memory[i];
      if (i == kept) continue;
      m.reservation->unmap(op, m.begin + rows * m.row_bytes, m.begin + capacity * m.row_bytes);
    }
    mapped = rows;
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
        reports_(call.op, index.table_count * kTableColumns, index.table_count + kRowClockExtra) {
    for (size_t s = 0; s < pending.size(); ++s) waiting_[s].memory = std::move(pending[s]);
    const RelaxedCapture relaxed(call.op);
    const size_t words =
        kSharedHeadWords + tables_.size() * kSharedTableWords + slabs_.size() * kSharedSlabWords;
    void* host = nullptr;
    void* mapped = nullptr;
    check_cuda(call.op, "allocating the shared counts",
               cudaHostAlloc(&host, words * 8, cudaHostAllocMapped | cudaHostAllocPortable));
    host_.words = static_cast<volatile int64_t*>(host);
    for (size_t i = 0; i < words; ++i) host_.words[i] = 0;
    check_cuda(call.op, "mapping the shared counts", cudaHostGetDevicePointer(&mapped, host, 0));
    host_.table_count = static_cast<int64_t>(tables_.size());
    device_words_ = {static_cast<volatile int64_t*>(mapped), host_.table_count};
  }
  ~GroupMemory() {
    for (cudaEvent_t event : step_events_) {
      if (event != nullptr && cudaEventDestroy(event) != cudaSuccess) cudaGetLastError();
    }
    if (cudaFreeHost(const_cast<int64_t*>(host_.words)) != cudaSuccess) cudaGetLastError();
  }
  GroupMemory(const GroupMemory&) = delete;

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
    const bool capturing = call.capturing();
    if (capturing) {
      captured_now_ += ids;
      for (size_t t = 0; t < touched.size(); ++t) {
        if (touched[t]) captured_tables_[t] = true;
      }
      make_headroom(call.on_stream(side_stream(call.op, device_)), captured_now_);
      return replay_room(touched);
    }
    end_capture();
    confirm();
    InsertionRoom room{true, false, 0, ++launched_};
    std::vector<int64_t> need_buckets(tables_.size(), 0);
    std::vector<int64_t> need_rows(slabs_.size(), 0);
    for (size_t t = 0; t < tables_.size(); ++t) {
      if (!touched[t]) continue;
      const volatile int64_t* shared = host_.table(static_cast<int64_t>(t));
      const int64_t size = shared[kSharedSize];
      const int64_t pending = pending_ids(t);
      const int64_t before = policies_.size_bound(t, size, pending);
      const int64_t after = policies_.size_bound(t, size, pending + ids);
      const int64_t count = shared[kSharedBucketCount];
      const int64_t most_now =
          pending == 0 ? count
                       : std::min(std::max(count, bucket_bound(before)), tables_[t].capacity);
      need_buckets[t] = std::max(most_now, bucket_bound(after));
      // a new id takes a slot, or leaves a tombstone where it replaces another
      const int64_t tombstones = shared[kSharedTombstones] + erased_ids();
      const int64_t used = size + pending + ids + tombstones;
      const bool has_tombstones = tombstones > 0 || (policies_.replaces(t) && pending > 0);
      const bool fills = used * 100 > count * kBucketWidth * kMaxUsedPercent;
      if (after > max_ids(count) || (has_tombstones && fills)) {
        room.growth = true;
        room.old_buckets += most_now;
      }
    }
    Pending entry{room.call_number, ids, touched, touched_slabs(touched)};
    for (size_t s = 0; s < slabs_.size(); ++s) {
      if (entry.slabs[s]) need_rows[s] = rows_needed(s, touched, ids);
    }
    room.mapped = map(call, need_buckets, need_rows);
    pending_.push_back(std::move(entry));
    return room;
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
    if (captured_ids_ == 0) return;
    cudaEvent_t& event = step_events_[static_cast<size_t>(steps_++) % step_events_.size()];
    if (event == nullptr) {
      check_cuda(call.op, "creating an event",
                 cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    } else {
      check_cuda(call.op, "waiting for an earlier step", cudaEventSynchronize(event));
    }
    check_cuda(call.op, "recording an event", cudaEventRecord(event, call.stream));
    make_headroom(call, captured_ids_);
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

  // Drops the calls that the device has finished.
  void confirm() {
    const int64_t finished = host_.words[kSharedCalls];
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

  // Rows of a slab once the pending calls and one of `ids` ids for these tables have been done, if
  // all their ids are new.
  int64_t rows_needed(size_t slab, const std::vector<bool>& tables, int64_t ids) const {
    int64_t incoming = ids;
    for (const Pending& p : pending_) incoming += p.slabs[slab] ? p.ids : 0;
    int64_t added = 0;
    for (size_t t = 0; t < tables_.size(); ++t) {
      if (static_cast<size_t>(slab_of_table_[t]) != slab || policies_.counts(t)) continue;
      const int64_t size = host_.table(static_cast<int64_t>(t))[kSharedSize];
      added += policies_.size_bound(t, size, pending_ids(t) + (tables[t] ? ids : 0)) - size;
    }
    return host_.slab(static_cast<int64_t>(slab))[kSharedNextRow] + std::min(incoming, added);
  }

  void end_capture() {
    captured_ids_ = std::max(captured_ids_, captured_now_);
    captured_now_ = 0;
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
    InsertionRoom room{true, false, 0, 0};
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

  // Memory and buckets for kReplaysAhead + 1 more batches of `ids` ids in every captured table: for
  // new ids, and for tombstones where a replay cannot rehash.
  void make_headroom(const Call& call, int64_t ids) {
    confirm();
    std::vector<int64_t> need_buckets(tables_.size(), 0);
    std::vector<int64_t> need_rows(slabs_.size(), 0);
    std::vector<int64_t> wanted(tables_.size(), 0);
    const int64_t batches = (kReplaysAhead + 1) * ids;
    for (size_t t = 0; t < tables_.size(); ++t) {
      if (!captured_tables_[t]) continue;
      const volatile int64_t* shared = host_.table(static_cast<int64_t>(t));
      const int64_t count = shared[kSharedBucketCount];
      const int64_t tombstones = shared[kSharedTombstones];
      const int64_t size = shared[kSharedSize];
      const int64_t incoming = pending_ids(t) + batches;
      const bool bounded = policies_.is_bounded(t);
      const int64_t most = bounded ? policies_.size_bound(t, size, incoming) : size + incoming;
      const bool fills = (most + tombstones) * 100 > count * kBucketWidth * kMaxUsedPercent;
      const bool compact = !bounded && policies_.replaces(t) && tombstones > 0 && fills;
      wanted[t] = std::min(buckets_for(most), tables_[t].capacity);
      if (wanted[t] <= count) wanted[t] = compact ? count : 0;
      need_buckets[t] = std::max(wanted[t], count);
    }
    const std::vector<bool> slabs = touched_slabs(captured_tables_);
    for (size_t s = 0; s < slabs_.size(); ++s) {
      if (slabs[s]) need_rows[s] = rows_needed(s, captured_tables_, batches);
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
  CountReports reports_;
  PolicyBounds policies_;
  SharedWords host_;
  SharedWords device_words_;
  std::deque<Pending> pending_;
  std::deque<Erasure> erasures_;
  int64_t launched_ = 0;
  int64_t captured_now_ = 0;
  int64_t captured_ids_ = 0;
  std::vector<bool> captured_tables_ = std::vector<bool>(tables_.size(), false);
  std::array<cudaEvent_t, kReplaysAhead> step_events_{};
  int64_t steps_ = 0;
};

}  // namespace dynemb::cuda
