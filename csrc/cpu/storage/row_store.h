// Rows on a disk, beneath a cache in memory: a log for each slab of rows, and one thread that moves
// rows between the cache and the logs.
//
// The callers own the cache's places and slots and decide what moves (cache.h); the thread owns the
// positions of records in files. Jobs are done one after another, in each first the saves, then the
// loads, so a row that is saved and loaded again is never read too early.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/storage/record.h"
#include "cpu/storage/block_io.h"

namespace dynemb::cpu {

// A tensor of a slab's cache, such as its weights: `bytes` for each slot.
struct RowPart {
  char* data;
  int64_t bytes;
};

// The cache's memory of one slab. A slab in memory has neither parts nor a log.
struct CachedSlab {
  std::vector<RowPart> parts;  // weights, then each tensor of optimizer state
  int32_t* generations;        // [slots]
  int64_t max_rows;            // row numbers are below it
  std::string name;            // of its directory

  bool is_stored() const { return !parts.empty(); }
  // Bytes of a record.
  int64_t record() const {
    int64_t bytes = 0;
    for (const RowPart& part : parts) bytes += part.bytes;
    return record_bytes(bytes);
  }
};

// A move of a row between its slot and the log.
struct RowMove {
  int64_t slot;
  int64_t handle;  // of the row
  int64_t id;
  int32_t table;
  int32_t generation;  // the slot's, with which the row is live there
};

struct SlabMoves {
  std::vector<RowMove> saves;  // of live rows in their slots; others are skipped
  std::vector<RowMove> loads;  // of rows with a record; others stay unwritten
};

struct StoreOptions {
  std::string path;       // a directory
  int64_t segment_bytes;  // a multiple of the page
  int64_t disk_bytes;     // limit of all segments together; 0: that of the file system
  IoPath io;
};

// Segments of a slab's log that a snapshot needs, and the positions of its records.
struct SlabSnapshot {
  std::vector<int64_t> records;  // by row: record number : 36 | generation : 28; 0: none
  std::vector<int64_t>
      segments;  // pairs: place of the segment in record numbers, number of its file
};

struct StoreStats {
  int64_t reads, bytes_read, writes, bytes_written;  // records; bytes of the files
  int64_t collected;                                 // records copied by garbage collection
  int64_t live_records, segments, pinned_segments, disk_bytes;
  int64_t queued, most_queued;  // jobs
  int64_t waited_us;            // time that callers have waited for jobs
  int64_t io;                   // the IoPath in use
};

class RowStore {
 public:
  // Opens the directory: creates it if needed, and locks it. Existing segments stay as they are
  // until keep() names those that snapshots need. Raises if another process has it (with its pid),
  // or if format or geometry differ.
  static std::shared_ptr<RowStore> open(const StoreOptions& options, std::vector<CachedSlab> slabs);
  virtual ~RowStore() = default;  // finishes queued jobs, and unlocks the directory

  // Raises the error of a failed job, then and ever after.
  virtual void check() = 0;
  // Reserves disk space for the next job, for rows[s] rows of slab s; replaces an earlier
  // reservation. Raises if space may be short: then nothing has changed, and a later call may
  // succeed. Jobs that save rows need a reservation. May wait for jobs.
  virtual void reserve_space(const std::vector<int64_t>& rows) = 0;
  // The same if the segments are ready; otherwise reserves nothing and returns false.
  virtual bool reserve_ready_space(const std::vector<int64_t>& rows) = 0;
  // Announces reservations of this size: the thread prepares segments for them as far as the disk
  // has unclaimed space. Does not wait.
  virtual void expect_space(const std::vector<int64_t>& rows) = 0;
  // Cancels the reservation: no job follows.
  virtual void cancel_reservation() = 0;
  // Queues a job; moves of slab s are at s. Jobs are numbered from 1.
  virtual void submit(std::vector<SlabMoves> job) = 0;
  virtual int64_t jobs_submitted() = 0;  // number of the last job
  // The last job such that all rows of it and of earlier jobs have moved.
  virtual int64_t jobs_done() = 0;
  // Waits until the rows of a job have moved; raises as check().
  virtual void wait_for(int64_t job) = 0;
  // Waits until all jobs are done; raises as check().
  virtual void drain() = 0;
  // Whether the log has a record with this handle, not counting saves of unfinished jobs.
  virtual bool has_record(size_t slab, int64_t handle) = 0;
  virtual void prefetch_record(size_t slab, int64_t handle) = 0;  // what has_record() reads
  virtual bool idle() = 0;

  // Copies records from the log, not from the cache; waits for all jobs. Slots of `rows` are
  // ignored. `found[i]`: 0 if row i has no record with this handle. A damaged record raises only
  // here; later calls work.
  virtual void read(size_t slab, const std::vector<RowMove>& rows, char* records,
                    uint8_t* found) = 0;
  // Appends records; only their payloads are read.
  virtual void write(size_t slab, const std::vector<RowMove>& rows, const char* records) = 0;

  // Drops the records of rows without an owner; garbage collection frees their space.
  virtual void erase(size_t slab, const std::vector<int64_t>& handles) = 0;

  // Makes all records durable and returns the snapshot, slab s at s. The segments stay at least
  // until the next keep().
  virtual std::vector<SlabSnapshot> sync() = 0;
  // Sets the files (by slab) that snapshots need from now on. Other files of this store are reused
  // when they are empty; other files that existed before it are deleted.
  virtual void keep(const std::vector<std::vector<int64_t>>& files) = 0;
  // Returns to a snapshot: later segments of this store are deleted, except those that other
  // snapshots need. Raises if a file is missing or short, before anything has changed.
  virtual void load(const std::vector<SlabSnapshot>& snapshot) = 0;

  // Pins the present records, after all jobs; returns the number of the pin. Their segments stay
  // until release(), whatever keep() says, and load() is refused until then.
  virtual int64_t pin() = 0;
  // Like read(), for the records of a pin; for any thread.
  virtual void read_pinned(int64_t pin, size_t slab, const std::vector<RowMove>& rows,
                           char* records, uint8_t* found) = 0;
  // Releases a pin. Does nothing in a failed store or in a forked process.
  virtual void release(int64_t pin) = 0;

  virtual StoreStats stats() = 0;
};

}  // namespace dynemb::cpu
