// A group of tables in mapped memory. Ops announce their work here, from any thread; this maps the
// memory for it and reads the reports of the device.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "cuda/index/count_reports.h"
#include "cuda/memory/calls_in_flight.h"
#include "cuda/memory/capture_headroom.h"
#include "cuda/memory/insertion_bounds.h"
#include "cuda/memory/mapped_tables.h"
#include "cuda/memory/pending_gradients.h"
#include "cuda/memory/reservation.h"
#include "cuda/memory/table_memory.h"

namespace dynemb::cuda {

class GroupMemory {
 public:
  GroupMemory(const Call& call, const IndexArgs& index, std::vector<Growing> tables,
              std::vector<int64_t> slab_of_table, std::vector<Growing> slabs,
              std::vector<Growing> pending);
  GroupMemory(const GroupMemory&) = delete;

  int32_t device() const { return device_; }
  SharedWords device_words() const { return device_words_; }
  const CountReports& reports() const { return reports_; }

  // Maps memory for all rows of the slab in one more part, unless the slab has it already.
  void add_rows(const Call& call, size_t slab, const RowMemory& part);
  // Lets rows of these slabs lie in host memory, beyond the budget; once, before there are rows.
  void split_rows(const Call& call, const std::vector<int64_t>& slabs,
                  std::shared_ptr<RowBudget> budget);
  // Bytes mapped for rows of split slabs and of those with a cache, by place.
  RowBudget::Bytes split_bytes() const;
  // Gives slabs a cache: see MappedTables::cache_rows. Called once, before there are rows.
  void cache_rows(const Call& call, const std::vector<CacheMemory>& caches,
                  std::shared_ptr<RowBudget> budget);
  // Maps memory for so many slots; returns the number of slots with memory, which is less if memory
  // is short.
  int64_t map_slots(const Call& call, size_t slab, int64_t slots);
  // The same, but raises if memory is short.
  void map_first_slots(const Call& call, size_t slab, int64_t slots);
  // Gives back memory of later slots. Nothing may run on the device.
  void release_slots(const Call& call, size_t slab, int64_t slots);
  // Where the dirty bits of a slab's slots and homes are; nullptr: nothing reads changes.
  void set_dirty_bits(size_t slab, uint8_t* bits);
  uint8_t* dirty_bits(size_t slab) const {
    return slab < dirty_bits_.size() ? dirty_bits_[slab] : nullptr;
  }
  // Of the calls of a group with a cache; else nullptr.
  std::shared_ptr<StreamOrder> order() const { return order_; }
  size_t slab_of_table(size_t table) const { return tables_.slab_of_table(table); }
  // Rows of the slab that have had an owner, as of the last finished insertion.
  int64_t known_rows(size_t slab) const {
    return host_words_.slab(static_cast<int64_t>(slab))[kSharedNextRow];
  }
  // Maps at least `room`, then reads the counts of the tables: waits for the stream.
  void bind(const Call& call, const TableRoom& room, const Tensor& tables, const Tensor& slabs,
            const Tensor* pending_counts, const std::optional<Tensor>& policy);
  // Gives back memory beyond `room`. Nothing may run on the device; call bind() afterwards.
  void release(const Call& call, const TableRoom& room);

  // See table_memory.h.
  InsertionRoom prepare_insertion(const Call& call, const std::vector<int64_t>& feature_tables,
                                  const std::vector<int64_t>& feature_policies, int64_t ids);
  void map_exactly(const Call& call, const NewIdCounts& new_ids);
  void map_buckets(const Call& call, int64_t table, int64_t buckets);
  void note_erasure(int64_t ids);
  std::vector<int64_t> prepare_append(const Call& call, const std::vector<bool>& touched,
                                      int64_t ids);
  std::vector<int64_t> prepare_merge(const Call& call);
  std::vector<int64_t> handle_rows(const Call& call) const;
  void note_applied();
  void end_step(const Call& call, const Tensor& tables, const Tensor& row_clock);

 private:
  void end_capture();

  std::mutex mutex_;
  int32_t device_;
  PinnedWords words_;
  SharedWords host_words_;
  SharedWords device_words_;
  CountReports reports_;
  MappedTables tables_;
  CallsInFlight calls_;
  InsertionBounds bounds_;
  CaptureHeadroom headroom_;
  PendingGradients pending_;
  std::shared_ptr<StreamOrder> order_;
  std::vector<uint8_t*> dirty_bits_;
};

}  // namespace dynemb::cuda
