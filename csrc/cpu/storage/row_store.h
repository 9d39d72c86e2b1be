// Rows on a disk, beneath a cache of them in memory: a log for each slab of rows, and one thread
// that moves rows between the cache and the logs.
//
// The callers own the cache's places and slots and decide what moves (cache.h); the thread owns
// where records lie in files. Jobs are done one after another, in each first the saves, then the
// loads, so a row that is saved and wanted back is never read too early.
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

// The cache's memory of one slab. A slab that is all in memory has no parts, and no log.
struct CachedSlab {
  std::vector<RowPart> parts;  // weights, then each tensor of optimizer state
  int32_t* generations;        // [slots]
  int64_t max_rows;            // row numbers are less
  std::string name;            // of its directory

  bool is_stored() const { return !parts.empty(); }
  // Bytes of a record.
  int64_t record() const {
    int64_t bytes = 0;
    for (const RowPart& part : parts) bytes += part.bytes;
    return record_bytes(bytes);
  }
};

// A row on its way between its slot and the log.
struct RowMove {
  int64_t slot;
  int64_t handle;  // of the row
  int64_t id;
  int32_t table;
  int32_t generation;  // the slot's, with which the row is live there
};

struct SlabMoves {
  std::vector<RowMove> saves;  // of rows that are live in their slots; the others are skipped
  std::vector<RowMove> loads;  // of rows that have a record; the others stay unwritten
};

struct StoreOptions {
  std::string path;       // a directory
  int64_t segment_bytes;  // a multiple of the page
  int64_t disk_bytes;     // that all segments together may take; 0: what the file system has
  IoPath io;
};

// Segments of a slab's log that a snapshot needs, and where its records are.
struct SlabSnapshot {
  std::vector<int64_t> records;  // by row: record number : 36 | generation : 28; 0: none
  std::vector<int64_t>
      segments;  // pairs: place of the segment in record numbers, number of its file
};

struct StoreStats {
  int64_t reads, bytes_read, writes, bytes_written;  // records; bytes of the files
  int64_t collected;                                 // records copied to free segments
  int64_t live_records, segments, pinned_segments, disk_bytes;
  int64_t queued, most_queued;  // jobs
  int64_t waited_us;            // that callers have waited for jobs
  int64_t io;                   // the IoPath in use
};

class RowStore {
 public:
  // Takes the directory: makes it where there is none, and locks it. Segments that are there stay
  // as they are until keep() says which of them snapshots need. Raises for another process'
  // directory (with its pid), another format or geometry.
  static std::shared_ptr<RowStore> open(const StoreOptions& options, std::vector<CachedSlab> slabs);
  virtual ~RowStore() = default;  // does what is queued, and lets the directory go

  // Raises what a job has failed with; from then on always.
  virtual void check() = 0;
  // Promises room on the disk to the next job, for as many rows of slab s as `rows` has at s, in
  // place of what was promised before. Raises where it might not find room: nothing has changed
  // then, and there may be room later. Jobs that save rows need a promise. May wait for jobs.
  virtual void reserve_space(const std::vector<int64_t>& rows) = 0;
  // The same where the segments for it are ready; else promises nothing and returns false.
  virtual bool promise_ready_room(const std::vector<int64_t>& rows) = 0;
  // Says that promises for as many rows are going to be asked for: the thread makes segments ready
  // for them as far as the disk has room that nothing else takes. Waits for nothing.
  virtual void hope_for_room(const std::vector<int64_t>& rows) = 0;
  // There is no job that wants what has been promised.
  virtual void withdraw_promises() = 0;
  // Queues a job; moves of slab s at s. Jobs are numbered from 1.
  virtual void submit(std::vector<SlabMoves> job) = 0;
  virtual int64_t jobs_submitted() = 0;  // the number of the last one
  // The last job after which all rows have moved, and those of the jobs before.
  virtual int64_t jobs_done() = 0;
  // Waits until the rows of a job have moved; raises as check().
  virtual void wait_for(int64_t job) = 0;
  // Waits until all jobs are done; raises as check().
  virtual void drain() = 0;
  // Whether the log has a record with this handle, but for what unfinished jobs save.
  virtual bool has_record(size_t slab, int64_t handle) = 0;
  virtual bool idle() = 0;

  // Copies records from the log, not from the cache; waits for all jobs. Slots of `rows` are not
  // read. `found[i]`: 0 where row i has no record with this handle. A record that is damaged raises
  // here and everything after it goes on.
  virtual void read(size_t slab, const std::vector<RowMove>& rows, char* records,
                    uint8_t* found) = 0;
  // Appends records, of which only the payloads are read.
  virtual void write(size_t slab, const std::vector<RowMove>& rows, const char* records) = 0;

  // Drops the records of rows that have no owner any more; what they take is collected.
  virtual void erase(size_t slab, const std::vector<int64_t>& handles) = 0;

  // Everything up to here durable in files: what a snapshot needs of slab s at s. The segments stay
  // until the next keep() at least.
  virtual std::vector<SlabSnapshot> sync() = 0;
  // Says which files (by slab) snapshots need from now on. Of the others, those of this store go
  // when they are empty; those that were there before it are deleted.
  virtual void keep(const std::vector<std::vector<int64_t>>& files) = 0;
  // Goes back to a snapshot: what this store has written since is deleted, but for what other
  // snapshots need. Raises where a file is missing or short, before anything has changed.
  virtual void load(const std::vector<SlabSnapshot>& snapshot) = 0;

  // Keeps the records that there are now, after all jobs, whatever comes after: its number. Their
  // segments stay until release(), whatever keep() says, and load() is refused until then.
  virtual int64_t hold() = 0;
  // As read(), for what a hold keeps; for any thread.
  virtual void read_held(int64_t hold, size_t slab, const std::vector<RowMove>& rows, char* records,
                         uint8_t* found) = 0;
  // Ends a hold. A store that has failed, or is a parent's, has none to end.
  virtual void release(int64_t hold) = 0;

  virtual StoreStats stats() = 0;
};

}  // namespace dynemb::cpu
