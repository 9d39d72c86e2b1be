#include <algorithm>

#include "cuda/index/growth.h"
#include "cuda/memory/capture_headroom.h"

namespace dynemb::cuda {

CaptureHeadroom::CaptureHeadroom(const Call& call, const IndexArgs& index, SharedWords shared,
                                 SharedWords device_words, MappedTables* tables,
                                 CallsInFlight* calls, const InsertionBounds& bounds)
    : index_(index),
      shared_(shared),
      device_words_(device_words),
      tables_(tables),
      calls_(calls),
      bounds_(bounds),
      device_(call.device),
      captured_now_(tables->table_count()),
      captured_(tables->table_count()) {}

CaptureHeadroom::~CaptureHeadroom() {
  const DeviceWait waited(device_);
  for (cudaEvent_t event : step_events_) {
    if (event != nullptr && cudaEventDestroy(event) != cudaSuccess) cudaGetLastError();
  }
}

void CaptureHeadroom::add(const Call& call, const std::vector<bool>& touched, int64_t ids) {
  captured_now_.ids += ids;
  for (size_t t = 0; t < touched.size(); ++t) {
    if (!touched[t]) continue;
    captured_now_.tables[t].ids += ids;
    ++captured_now_.tables[t].calls;
  }
  // replays run on another stream
  make(call.on_stream(side_stream(call.op, device_)), captured_now_, true);
}

void CaptureHeadroom::end_capture() {
  captured_.cover(captured_now_);
  captured_now_ = Replay(captured_.tables.size());
}

void CaptureHeadroom::end_step(const Call& call) {
  cudaEvent_t& event = step_events_[steps_++ % step_events_.size()];
  if (event == nullptr) {
    check_cuda(call.op, "creating an event",
               cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  } else {
    check_cuda(call.op, "waiting for an earlier step", cudaEventSynchronize(event));
  }
  check_cuda(call.op, "recording an event", cudaEventRecord(event, call.stream));
  calls_->end_step();
  make(call, captured_, false);
}

void CaptureHeadroom::Replay::cover(const Replay& other) {
  ids = std::max(ids, other.ids);
  for (size_t t = 0; t < tables.size(); ++t) {
    tables[t].ids = std::max(tables[t].ids, other.tables[t].ids);
    tables[t].calls = std::max(tables[t].calls, other.tables[t].calls);
  }
}

// Probable number of a table's ids in a replay.
int64_t CaptureHeadroom::own_ids(size_t table, const TableIds& captured) const {
  const int64_t of_call = (captured.ids + captured.calls - 1) / captured.calls;
  return std::min(captured.ids, bounds_.own_ids(table, of_call) * captured.calls);
}

CaptureHeadroom::TableNeeds CaptureHeadroom::needs(size_t table, int64_t incoming) const {
  const PolicyBounds& policies = bounds_.policies();
  const volatile int64_t* counts = shared_.table(static_cast<int64_t>(table));
  const int64_t capacity = tables_->bucket_capacity(table);
  const int64_t under_way = calls_->rehashed_buckets(table);
  const int64_t counted = counts[kSharedBucketCount];
  const int64_t count = std::max(counted, under_way);
  // A rehash drops tombstones; later ones are among the incoming ids.
  const int64_t tombstones = under_way > 0 ? 0 : counts[kSharedTombstones];
  const int64_t size = counts[kSharedSize];
  const bool bounded = policies.is_bounded(table);
  const int64_t most = bounded ? policies.size_bound(table, size, incoming) : size + incoming;
  const bool fills = (most + tombstones) * 100 > count * kBucketWidth * kMaxUsedPercent;
  const bool compacts = !bounded && policies.replaces(table) && tombstones > 0 && fills;
  const int64_t least = compacts ? count : 0;
  const int64_t exactly = std::min(buckets_for(most), capacity);
  const int64_t usual = std::min(decide_growth(count, capacity, most, 0, 0).bucket_count, capacity);
  return {count, exactly > count ? exactly : least, usual > count ? usual : least};
}

// Memory and buckets for kReplaysOfHeadroom more replays: for new ids, and for tombstones if a
// replay cannot rehash. Each table gets space for as many of its ids as a call has brought so far.
// All replays together exceed this only if several bring more than any call before.
void CaptureHeadroom::make(const Call& call, const Replay& replay, bool waits) {
  calls_->confirm();
  const size_t table_count = tables_->table_count();
  TableRoom exact_room = tables_->no_room();
  TableRoom room = tables_->no_room();
  std::vector<int64_t> exactly(table_count, 0);
  std::vector<int64_t> wanted(table_count, 0);
  std::vector<int64_t> batches(table_count, 0);
  std::vector<bool> touched(table_count, false);
  for (size_t t = 0; t < table_count; ++t) {
    if (replay.tables[t].calls == 0) continue;
    touched[t] = true;
    batches[t] = kReplaysOfHeadroom * own_ids(t, replay.tables[t]);
    const TableNeeds table = needs(t, calls_->ids_of_table(t) + batches[t]);
    exactly[t] = table.exactly;
    wanted[t] = table.usual;
    exact_room.buckets[t] = std::max(table.exactly, table.buckets);
    room.buckets[t] = std::max(table.usual, table.buckets);
  }
  const std::vector<bool> slabs = bounds_.touched_slabs(touched);
  for (size_t s = 0; s < slabs.size(); ++s) {
    if (slabs[s]) room.rows[s] = bounds_.rows_needed(s, batches, kReplaysOfHeadroom * replay.ids);
  }
  if (!tables_->map(call, room)) {
    exact_room.rows = room.rows;
    tables_->map_or_raise(call, exact_room, "room for the replays of a captured step takes");
    room = exact_room;
    wanted = exactly;
  }
  tables_->need(room);
  const RelaxedCapture relaxed(call.op);
  for (size_t t = 0; t < table_count; ++t) {
    if (wanted[t] == 0) continue;
    rehash_table(call, index_, device_words_, static_cast<int64_t>(t), wanted[t], Rehash::kCompact,
                 wanted[t]);
    if (waits) {
      call.synchronize();
    } else {
      // the event of the next step comes after it, and is waited for kReplaysAhead steps later
      calls_->note_rehash(t, wanted[t], kReplaysAhead + 1);
    }
  }
}

}  // namespace dynemb::cuda
