#include "cpu/storage/store_worker.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <sstream>
#include <utility>

#include "core/index/handle.h"
#include "core/runtime/check.h"
#include "core/runtime/error_class.h"
#include "core/storage/record.h"
#include "cpu/storage/prefetch.h"

namespace dynemb::cpu {
namespace {

constexpr int64_t kReadySegments = 2;  // free segments of a slab that are kept ready
// Without a limit, files take about so many times the live records before garbage collection
// starts.
constexpr int64_t kUsualFactor = 2;
constexpr double kUsualMostLive = 0.75;
// Garbage collection of a job: so many times the average need.
constexpr double kCollectAhead = 1.25;
constexpr int64_t kLeastCopies = 64;
constexpr size_t kPrefetch = 16;  // rows ahead
// A snapshot leaves at least so many times the live records to later writes, if it can, and takes
// at least as many segments as so many times the live records fill. Without a limit, the disk
// counts as a multiple of the live records.
constexpr double kLeftForOthers = 1.25;
constexpr double kDensest = 1.05;
constexpr double kUnboundedDisk = 4.25;
// Moves between the prefetch of a row, or of an entry of the log's map, and its use.
constexpr size_t kFetchAhead = 4;
constexpr size_t kEntriesAhead = 16;

void fetch_row(const CachedSlab& slab, int64_t slot) {
  __builtin_prefetch(slab.generations + slot);
  for (const RowPart& part : slab.parts) prefetch_bytes(part.data + slot * part.bytes, part.bytes);
}

std::vector<SlabFormat> formats_of(const std::vector<CachedSlab>& slabs) {
  std::vector<SlabFormat> formats;
  for (const CachedSlab& slab : slabs)
    formats.push_back({slab.name, slab.is_stored() ? slab.record() : 0});
  return formats;
}

std::vector<std::unique_ptr<RecordLog>> logs_of(SegmentFiles& files, PendingWrites& writes,
                                                const std::vector<CachedSlab>& slabs, Room& room) {
  std::vector<std::unique_ptr<RecordLog>> logs;
  for (size_t s = 0; s < slabs.size(); ++s) {
    logs.emplace_back();
    if (!slabs[s].is_stored()) continue;
    logs.back() =
        std::make_unique<RecordLog>(files, writes, s, slabs[s].record(), slabs[s].max_rows);
    room[s].a_segment = logs.back()->layout().records_per_segment();
  }
  return logs;
}

int64_t largest_buffer(const std::vector<CachedSlab>& slabs, int64_t segment_bytes) {
  int64_t bytes = kPageBytes;
  for (const CachedSlab& slab : slabs) {
    if (!slab.is_stored()) continue;
    bytes = std::max(bytes, RecordLog::buffer_bytes({slab.record(), segment_bytes}));
  }
  return bytes;
}

int64_t largest_block(const std::vector<std::unique_ptr<RecordLog>>& logs) {
  int64_t bytes = kPageBytes;
  for (const auto& log : logs) {
    if (log) bytes = std::max(bytes, log->block_bytes());
  }
  return bytes;
}

}  // namespace

StoreWorker::StoreWorker(const StoreOptions& options, std::vector<CachedSlab> slabs,
                         std::mutex& mutex, Room& room)
    : options_(options),
      slabs_(std::move(slabs)),
      files_(options.path, options.segment_bytes, formats_of(slabs_)),
      pending_(files_, largest_buffer(slabs_, options.segment_bytes)),
      logs_(logs_of(files_, pending_, slabs_, room)),
      collection_(files_, pending_, logs_),
      reader_(options.io, largest_block(logs_)),
      mutex_(mutex),
      room_(room) {}

void StoreWorker::run(const std::vector<SlabMoves>& job, const std::function<void()>& moved) {
  const int64_t before = write_bytes_;
  for (size_t s = 0; s < job.size(); ++s) save_rows(s, job[s].saves);
  for (size_t s = 0; s < job.size(); ++s) load_rows(s, job[s].loads);
  moved();
  prepare(write_bytes_ - before);
}

void StoreWorker::append_done(size_t slab, int64_t rows) {
  publish(slab);
  const std::lock_guard<std::mutex> lock(mutex_);
  room_[slab].queued -= rows;
}

void StoreWorker::save_rows(size_t s, const std::vector<RowMove>& saves) {
  if (saves.empty()) return;
  RecordLog& log = *logs_[s];
  const CachedSlab& slab = slabs_[s];
  for (size_t i = 0; i < saves.size(); ++i) {
    if (i + kFetchAhead < saves.size()) {
      const RowMove& later = saves[i + kFetchAhead];
      fetch_row(slab, later.slot);
      log.prefetch_entry(later.handle);
    }
    const RowMove& move = saves[i];
    if (slab.generations[move.slot] != move.generation) continue;  // never written
    char* to = log.begin_record() + sizeof(RecordHeader);
    for (const RowPart& part : slab.parts) {
      std::memcpy(to, part.data + move.slot * part.bytes, static_cast<size_t>(part.bytes));
      to += part.bytes;
    }
    log.end_record(move.handle, move.id, move.table);
    ++writes_;
    write_bytes_ += log.layout().record;
  }
  append_done(s, static_cast<int64_t>(saves.size()));
}

void StoreWorker::load_rows(size_t s, const std::vector<RowMove>& loads) {
  if (loads.empty()) return;
  RecordLog& log = *logs_[s];
  const CachedSlab& slab = slabs_[s];
  std::vector<WantedRecord> wanted;
  wanted.reserve(loads.size());
  for (size_t i = 0; i < loads.size(); ++i) {
    if (i + kEntriesAhead < loads.size()) log.prefetch_entry(loads[i + kEntriesAhead].handle);
    const int64_t number = log.find(loads[i].handle);
    if (number != RecordMap::kNone) wanted.push_back({number, loads[i].handle, loads[i].id, i});
  }
  const auto fetch = [&](size_t i) { fetch_row(slab, loads[i].slot); };
  reader_.read(log, wanted, fetch, [&](size_t i, const char* record) {
    const RowMove& move = loads[i];
    const char* from = record + sizeof(RecordHeader);
    for (const RowPart& part : slab.parts) {
      std::memcpy(part.data + move.slot * part.bytes, from, static_cast<size_t>(part.bytes));
      from += part.bytes;
    }
    slab.generations[move.slot] = move.generation;
  });
}

void StoreWorker::read(size_t s, const std::vector<RowMove>& rows, char* records, uint8_t* found) {
  read_found(s, rows, [&](int64_t handle) { return logs_[s]->find(handle); }, records, found);
}

void StoreWorker::read_found(size_t s, const std::vector<RowMove>& rows,
                             const std::function<int64_t(int64_t)>& find, char* records,
                             uint8_t* found) {
  const RecordLog& log = *logs_[s];
  const auto bytes = static_cast<size_t>(log.layout().record);
  std::vector<WantedRecord> wanted;
  for (size_t i = 0; i < rows.size(); ++i) {
    const int64_t number = find(rows[i].handle);
    found[i] = number != RecordMap::kNone ? 1 : 0;
    if (found[i] != 0) wanted.push_back({number, rows[i].handle, rows[i].id, i});
  }
  const auto fetch = [&](size_t i) { prefetch_bytes(records + i * bytes, log.layout().record); };
  reader_.read(log, wanted, fetch, [&](size_t i, const char* record) {
    std::memcpy(records + i * bytes, record, bytes);
  });
}

void StoreWorker::write(size_t s, const std::vector<RowMove>& rows, const char* records) {
  RecordLog& log = *logs_[s];
  const auto bytes = static_cast<size_t>(log.layout().record);
  for (size_t i = 0; i < rows.size(); ++i) {
    if (i + kPrefetch < rows.size()) log.prefetch_entry(rows[i + kPrefetch].handle);
    std::memcpy(log.begin_record(), records + i * bytes, bytes);
    log.end_record(rows[i].handle, rows[i].id, rows[i].table);
  }
  const auto count = static_cast<int64_t>(rows.size());
  writes_ += count;
  write_bytes_ += count * log.layout().record;
  append_done(s, count);
}

void StoreWorker::erase(size_t s, const std::vector<int64_t>& handles) {
  for (const int64_t handle : handles) logs_[s]->erase(handle);
}

// --- room ---

void StoreWorker::publish(size_t slab) {
  const RecordLog& log = *logs_[slab];
  const bool collects = collection_.victim().log == &log;
  const std::lock_guard<std::mutex> lock(mutex_);
  SlabRoom& room = room_[slab];
  room.head_room = log.head_room();
  room.free = log.free_segments();
  room.is_collecting = collects;
  room.collecting = collects ? collection_.victim().live() : 0;
}

// Without a limit: twice the live records, plus segments of snapshots, plus those that are ready or
// expected.
int64_t StoreWorker::usual_bytes() const {
  if (options_.disk_bytes > 0) return options_.disk_bytes;
  int64_t segments = 0;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (size_t s = 0; s < logs_.size(); ++s) {
    const auto& log = logs_[s];
    if (!log) continue;
    const int64_t a_segment = log->layout().records_per_segment();
    segments += (kUsualFactor * log->live() + a_segment - 1) / a_segment + 1 + kReadySegments;
    segments += log->pinned_segments() + (room_[s].expected + a_segment - 1) / a_segment;
  }
  return segments * files_.segment_bytes();
}

bool StoreWorker::create_segment(size_t slab, bool beyond_usual) {
  if (options_.disk_bytes > 0 && beyond_usual) return false;
  if (!beyond_usual && files_.bytes() + files_.segment_bytes() > usual_bytes()) return false;
  const SegmentFile file = files_.create(slab);
  if (file.number == 0) return false;
  logs_[slab]->add_free(file);
  publish(slab);
  return true;
}

// Takes a free segment from a slab that has more than it needs plus `spare`.
bool StoreWorker::take_segment_of_another(size_t slab, int64_t spare) {
  for (size_t other = 0; other < logs_.size(); ++other) {
    if (other == slab || !logs_[other]) continue;
    SegmentFile file{0};
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (room_[other].free <= room_.needed(other) + spare) continue;
      file = logs_[other]->take_free();
      --room_[other].free;
    }
    try {
      files_.rename(other, file, slab);
    } catch (...) {
      logs_[other]->add_free(file);
      publish(other);
      throw;
    }
    logs_[slab]->add_free(file);
    publish(slab);
    return true;
  }
  return false;
}

bool StoreWorker::begin_collection(double most_live) {
  const Collection::Victim victim = collection_.best();
  return victim.log != nullptr && victim.live_part() <= most_live && start(victim);
}

// Returns whether there was space to begin.
bool StoreWorker::start(const Collection::Victim& victim) {
  const size_t slab = victim.log->slab();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    SlabRoom& room = room_[slab];
    room.is_collecting = true;
    room.collecting = victim.live();
    if (room.free < room_.wanted(slab)) {
      room.is_collecting = false;
      room.collecting = 0;
      return false;
    }
  }
  collection_.begin(victim);
  return true;
}

void StoreWorker::step_collection(int64_t records) {
  const size_t slab = collection_.victim().log->slab();
  collection_.step(records);
  publish(slab);
}

void StoreWorker::finish_collection() {
  while (collection_.is_running()) {
    step_collection(collection_.victim().log->layout().records_per_segment());
  }
}

void StoreWorker::make_room(size_t slab, int64_t rows) {
  while (true) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (room_.is_enough(slab, rows)) {
        room_[slab].reserved = rows;
        return;
      }
    }
    if (collection_.is_running()) {
      finish_collection();
      continue;
    }
    if (create_segment(slab, /*beyond_usual=*/false)) continue;
    if (take_segment_of_another(slab, 0)) continue;
    if (options_.disk_bytes == 0) {
      if (begin_collection(kUsualMostLive)) continue;
      if (create_segment(slab, /*beyond_usual=*/true)) continue;
    }
    if (begin_collection(1.0)) continue;
    raise_disk_full(slab, rows);
  }
}

void StoreWorker::prepare_expected_space() {
  for (size_t s = 0; s < logs_.size(); ++s) {
    const auto is_enough = [&] {
      const std::lock_guard<std::mutex> lock(mutex_);
      return room_[s].expected == 0 || room_.is_enough(s, room_[s].expected);
    };
    while (logs_[s] && !is_enough() && create_segment(s, /*beyond_usual=*/false)) {
    }
  }
}

void StoreWorker::raise_disk_full(size_t slab, int64_t rows) {
  int64_t needed = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    needed = std::max<int64_t>(room_.needed(slab, rows) - room_[slab].free, 0);
  }
  int64_t pinned = 0;
  for (const auto& log : logs_) {
    if (log) pinned += log->pinned_segments();
  }
  const bool bounded =
      options_.disk_bytes > 0 && files_.bytes() + files_.segment_bytes() > options_.disk_bytes;
  std::ostringstream text;
  text << "dynemb: disk full: path " << options_.path << " needs "
       << needed * files_.segment_bytes() << " more bytes for " << rows << " rows of "
       << slabs_[slab].name << ", but there are ";
  if (bounded) {
    text << std::max<int64_t>(options_.disk_bytes - files_.bytes(), 0)
         << " of disk=" << options_.disk_bytes;
  } else {
    text << files_.available_bytes() << " in the file system";
  }
  text << "; snapshots keep " << pinned << " segments (" << pinned * files_.segment_bytes()
       << " bytes). Nothing has been changed. "
       << (bounded ? "Give a larger disk=" : "Free space in the file system")
       << ", erase ids, or keep fewer snapshots";
  if (std::any_of(logs_.begin(), logs_.end(),
                  [](const auto& log) { return log && log->has_pins(); })) {
    text << "; some of these segments are an asynchronous save's: wait for it";
  }
  throw Refusal(text.str() + kDiskFullError);
}

// Whether a slab has fewer free segments than it should, and no unclaimed space is left.
bool StoreWorker::is_low() {
  for (size_t s = 0; s < logs_.size(); ++s) {
    if (!logs_[s] || logs_[s]->segments() == 0) continue;
    while (true) {
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (room_[s].free >= room_.wanted(s) + kReadySegments) break;
      }
      if (create_segment(s, /*beyond_usual=*/false)) continue;
      if (take_segment_of_another(s, kReadySegments - 1)) continue;
      return true;
    }
  }
  return false;
}

// The amount of garbage collection follows from the appended bytes, so that no job waits for a
// whole segment.
void StoreWorker::prepare(int64_t appended_bytes) {
  pending_.check();
  const double most_live = options_.disk_bytes > 0 ? 1.0 : kUsualMostLive;
  prepare_expected_space();
  const bool low = is_low();
  for (auto quota = static_cast<double>(appended_bytes); quota > 0;) {
    if (!collection_.is_running() && !(low && is_low() && begin_collection(most_live))) return;
    // Freeing a segment costs copies of its live records, and gives space for as many as were dead.
    const double live = collection_.live_part_at_begin();
    const double share = kCollectAhead * live / (1 - live);
    const auto record = static_cast<double>(collection_.victim().log->layout().record);
    const int64_t before = collection_.collected();
    step_collection(static_cast<int64_t>(quota * share / record) + kLeastCopies);
    if (collection_.is_running()) return;
    const auto copied = static_cast<double>(collection_.collected() - before);
    quota -= share > 0 ? copied * record / share : static_cast<double>(files_.segment_bytes());
  }
}

// --- snapshots ---

// A snapshot keeps every segment with a live record. If this would leave too little of the disk for
// later writes, the live records of sparse segments are copied first.
void StoreWorker::compact_for_snapshot() {
  while (true) {
    double live = 0;
    int64_t holding = 0;
    for (const auto& log : logs_) {
      if (!log) continue;
      live += static_cast<double>(log->live()) /
              static_cast<double>(log->layout().records_per_segment());
      holding += log->holding_segments();
    }
    const double disk = options_.disk_bytes > 0 ? static_cast<double>(options_.disk_bytes) /
                                                      static_cast<double>(files_.segment_bytes())
                                                : kUnboundedDisk * live;
    const double most = std::max(disk - kLeftForOthers * live, kDensest * live);
    if (static_cast<double>(holding) <= most + static_cast<double>(logs_.size())) return;
    Collection::Victim victim = collection_.best(/*pinned=*/true);
    if (victim.log == nullptr) return;
    const size_t slab = victim.log->slab();
    try {
      make_room(slab, victim.live());
    } catch (const Refusal&) {
      return;  // the snapshot uses the segments as they are
    }
    finish_collection();  // the one that made the space; its segment may be the victim
    victim = collection_.best(/*pinned=*/true);
    const bool started = victim.log != nullptr && victim.log->slab() == slab && start(victim);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      room_[slab].reserved = 0;
    }
    if (!started) return;
    finish_collection();
  }
}

std::vector<SlabSnapshot> StoreWorker::sync() {
  finish_collection();  // it assumes the rest of the page, which a flush leaves empty
  compact_for_snapshot();
  std::vector<SlabSnapshot> snapshot;
  for (size_t s = 0; s < logs_.size(); ++s) {
    snapshot.emplace_back();
    if (!logs_[s]) continue;
    RecordLog& log = *logs_[s];
    log.sync();
    snapshot.back() = {log.entries(), log.live_segments()};
    std::set<int64_t> pinned = log.pinned();
    const std::vector<int64_t>& segments = snapshot.back().segments;
    for (size_t i = 1; i < segments.size(); i += 2) pinned.insert(segments[i]);
    log.pin(std::move(pinned));
    publish(s);
  }
  files_.sync_names();
  return snapshot;
}

void StoreWorker::keep(const std::vector<std::vector<int64_t>>& files) {
  for (size_t s = 0; s < logs_.size(); ++s) {
    if (!logs_[s]) continue;
    logs_[s]->pin({files[s].begin(), files[s].end()});
    logs_[s]->delete_others();
  }
}

void StoreWorker::load(const std::vector<SlabSnapshot>& snapshot) {
  for (const auto& log : logs_) {
    if (!log || !log->has_pins()) continue;
    throw Refusal("dynemb: rows of path " + options_.path +
                  " are pinned by an asynchronous save that has not ended: wait for it before "
                  "loading a snapshot. Nothing has changed" +
                  kInUseError);
  }
  std::vector<RecordLog::Restored> states(logs_.size());
  try {
    for (size_t s = 0; s < logs_.size(); ++s) {
      if (!logs_[s]) continue;
      states[s] = logs_[s]->open_snapshot(snapshot[s].records, snapshot[s].segments);
    }
  } catch (const std::exception& error) {
    throw Refusal(error.what());
  }
  collection_.abandon();
  for (size_t s = 0; s < logs_.size(); ++s) {
    if (!logs_[s]) continue;
    logs_[s]->restore(states[s]);
    publish(s);
  }
}

void StoreWorker::add_stats(StoreStats& stats) const {
  stats.reads = reader_.reads();
  stats.bytes_read = reader_.bytes_read() + collection_.bytes_read();
  stats.writes = writes_;
  stats.bytes_written = files_.bytes_written();
  stats.collected = collection_.collected();
  stats.disk_bytes = files_.bytes();
  stats.segments = stats.disk_bytes / files_.segment_bytes();
  stats.live_records = stats.pinned_segments = 0;
  for (const auto& log : logs_) {
    if (!log) continue;
    stats.live_records += log->live();
    stats.pinned_segments += log->pinned_segments();
  }
  stats.io = static_cast<int64_t>(reader_.path());
}

}  // namespace dynemb::cpu
