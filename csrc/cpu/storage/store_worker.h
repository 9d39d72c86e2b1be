// Work of the storage thread: moves rows between slots and logs, and prepares segments.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/storage/collection.h"
#include "cpu/storage/pending_writes.h"
#include "cpu/storage/record_log.h"
#include "cpu/storage/record_reader.h"
#include "cpu/storage/room.h"
#include "cpu/storage/row_store.h"
#include "cpu/storage/segment_files.h"

namespace dynemb::cpu {

// A request that cannot be met. Nothing has changed, and the store goes on.
struct Refusal : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class StoreWorker {
 public:
  // `mutex` protects `room`.
  StoreWorker(const StoreOptions& options, std::vector<CachedSlab> slabs, std::mutex& mutex,
              Room& room);

  // Calls `moved` when all rows have moved, before garbage collection for later jobs.
  void run(const std::vector<SlabMoves>& job, const std::function<void()>& moved);
  // For any thread.
  bool has_record(size_t slab, int64_t handle) const { return logs_[slab]->has_record(handle); }
  void prefetch_record(size_t slab, int64_t handle) const { logs_[slab]->prefetch_entry(handle); }
  // Takes, creates or collects segments until `rows` more fit, and reserves them. Raises Refusal.
  void make_room(size_t slab, int64_t rows);
  // Prepares segments for expected rows, as far as the disk has space for more.
  void prepare_expected_space();
  void read(size_t slab, const std::vector<RowMove>& rows, char* records, uint8_t* found);
  // prepare() follows.
  void write(size_t slab, const std::vector<RowMove>& rows, const char* records);
  // Called after a job that has appended so many bytes: prepares segments for the next ones.
  void prepare(int64_t appended_bytes);
  // Waits for full buffers on their way to files.
  void finish_writes() { pending_.wait_for_all(); }
  int64_t record_bytes(size_t slab) const { return logs_[slab]->layout().record; }
  void erase(size_t slab, const std::vector<int64_t>& handles);
  std::vector<SlabSnapshot> sync();
  void keep(const std::vector<std::vector<int64_t>>& files);
  void load(const std::vector<SlabSnapshot>& snapshot);
  int64_t pin();
  void read_pinned(int64_t pin, size_t slab, const std::vector<RowMove>& rows, char* records,
                   uint8_t* found);
  void release(int64_t pin);

  void add_stats(StoreStats& stats) const;
  SegmentFiles& files() { return files_; }

 private:
  void save_rows(size_t slab, const std::vector<RowMove>& saves);
  void load_rows(size_t slab, const std::vector<RowMove>& loads);
  void append_done(size_t slab, int64_t rows);
  // `find` returns the number of a handle's record, or RecordMap::kNone.
  void read_found(size_t slab, const std::vector<RowMove>& rows,
                  const std::function<int64_t(int64_t)>& find, char* records, uint8_t* found);

  void publish(size_t slab);
  bool create_segment(size_t slab, bool beyond_usual);
  bool take_segment_of_another(size_t slab, int64_t spare);
  bool begin_collection(double most_live);
  void step_collection(int64_t records);
  void finish_collection();
  bool start(const Collection::Victim& victim);
  void compact_for_snapshot();
  int64_t usual_bytes() const;
  bool is_low();
  [[noreturn]] void raise_disk_full(size_t slab, int64_t rows);

  StoreOptions options_;
  std::vector<CachedSlab> slabs_;
  SegmentFiles files_;
  PendingWrites pending_;
  std::vector<std::unique_ptr<RecordLog>> logs_;  // null for slabs in memory
  Collection collection_;
  RecordReader reader_;
  std::mutex& mutex_;
  Room& room_;
  int64_t writes_ = 0;
  int64_t write_bytes_ = 0;
  int64_t last_pin_ = 0;
};

}  // namespace dynemb::cpu
