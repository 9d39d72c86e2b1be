#include "cpu/storage/record_log.h"

#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "core/index/handle.h"
#include "core/runtime/check.h"
#include "cpu/storage/crc32c.h"

namespace dynemb::cpu {
namespace {

constexpr int64_t kBufferBytes = int64_t{1} << 20;
constexpr int64_t kRecordBits = 36;

}  // namespace

// The buffer of a record larger than the usual one has the record's size plus the header's page.
int64_t RecordLog::buffer_bytes(const SegmentLayout& layout) {
  const int64_t least = (1 + layout.pages_per_record()) * kPageBytes;
  return std::max(least, std::min(kBufferBytes, layout.segment));
}

RecordLog::RecordLog(SegmentFiles& files, PendingWrites& writes, size_t slab, int64_t record_bytes,
                     int64_t max_rows)
    : files_(files),
      writes_(writes),
      slab_(slab),
      layout_{record_bytes, files.segment_bytes()},
      map_(max_rows),
      places_(1),
      buffer_(writes.new_buffer()) {}

SegmentFile RecordLog::take_free() {
  const SegmentFile file = free_.back();
  free_.pop_back();
  return file;
}

int64_t RecordLog::head_room() const {
  return head_ == 0 ? 0 : layout_.records_per_segment() - next_;
}

int64_t RecordLog::page_of_next() const { return layout_.offset(next_) / kPageBytes; }

void RecordLog::next_segment() {
  DYNEMB_CHECK(!free_.empty(), "dynemb: no segment is free for ", files_.name(slab_, 0),
               ": a job was queued without room for it");
  auto vacant = std::find_if(places_.begin() + 1, places_.end(),
                             [](const Place& place) { return place.state == PlaceState::kVacant; });
  head_ = vacant - places_.begin();
  DYNEMB_CHECK((head_ + 1) * layout_.records_per_segment() < int64_t{1} << kRecordBits,
               "dynemb: the log has more records than ", kRecordBits, " bits can number");
  if (vacant == places_.end()) places_.emplace_back();
  places_[head_] = {take_free(), PlaceState::kHead, 0, true};
  ++used_;
  next_ = 0;
  buffer_page_ = 0;
  files_.write_header(slab_, places_[head_].file.number, buffer_->data());
}

void RecordLog::write_buffer() {
  // the page of the next record has content if the record is not its first
  const bool partial = layout_.offset(next_) % kPageBytes != 0;
  const int64_t end = page_of_next() + (partial ? 1 : 0);
  const int64_t bytes = (end - buffer_page_) * kPageBytes;
  if (bytes > 0) {
    if (partial) {
      char* rest = next_memory();
      std::memset(rest, 0, static_cast<size_t>(buffer_->data() + bytes - rest));
    }
    writes_.write(slab_, places_[head_].file, buffer_page_ * kPageBytes, buffer_, bytes);
    places_[head_].unsynced = true;
  }
  buffer_page_ = end;
}

void RecordLog::seal() {
  write_buffer();
  if (!files_.direct()) {
    writes_.wait_for(slab_, places_[head_].file.number);
    files_.forget_pages(slab_, places_[head_].file, 0, layout_.segment);
  }
  places_[head_].state = PlaceState::kSealed;
  head_ = 0;
}

void RecordLog::flush() {
  if (head_ == 0) return;
  write_buffer();
  const int64_t a_page = layout_.records_per_page();
  next_ = std::min((next_ + a_page - 1) / a_page * a_page, layout_.records_per_segment());
}

char* RecordLog::begin_record() {
  if (head_ != 0 && next_ == layout_.records_per_segment()) seal();
  if (head_ == 0) next_segment();
  const int64_t offset = layout_.offset(next_);
  const int64_t page = offset / kPageBytes;
  if ((page + layout_.pages_per_record() - buffer_page_) * kPageBytes > buffer_->bytes()) {
    write_buffer();
    buffer_page_ = page;
  }
  char* memory = buffer_->data() + (offset - buffer_page_ * kPageBytes);
  // the buffer has earlier content: zeros end a record and follow the last one of its pages
  const int64_t begin = offset % kPageBytes;
  const int64_t pages = layout_.pages_per_record() * kPageBytes;
  const bool is_last = begin + 2 * layout_.record > pages;
  std::memset(memory + layout_.record - kRecordAlignment, 0, kRecordAlignment);
  if (is_last) {
    std::memset(memory + layout_.record, 0, static_cast<size_t>(pages - begin - layout_.record));
  }
  return memory;
}

void RecordLog::end_record(int64_t handle, int64_t id, int32_t table) {
  char* memory = next_memory();
  RecordHeader header{0, table, handle, id};
  std::memcpy(memory, &header, sizeof(header));
  header.crc = crc32c(0, memory + sizeof(header.crc),
                      static_cast<size_t>(layout_.record) - sizeof(header.crc));
  std::memcpy(memory, &header.crc, sizeof(header.crc));
  set_record(handle);
}

void RecordLog::append(const char* record, int64_t handle) {
  std::memcpy(begin_record(), record, static_cast<size_t>(layout_.record));
  set_record(handle);
}

// Makes the record in memory that of its row.
void RecordLog::set_record(int64_t handle) {
  const int64_t before = map_.number(handle_row(handle));
  if (before != RecordMap::kNone) {
    --places_[before / layout_.records_per_segment()].live;
    --live_;
  }
  map_.set(handle, first_record(head_) + next_);
  ++places_[head_].live;
  ++live_;
  ++next_;
}

void RecordLog::sync() {
  flush();
  writes_.wait_for_all();
  for (Place& place : places_) {
    if (place.state == PlaceState::kVacant || !place.unsynced) continue;
    files_.sync(slab_, place.file);
    files_.forget_pages(slab_, place.file, 0, layout_.segment);
    place.unsynced = false;
  }
}

void RecordLog::erase(int64_t handle) {
  const int64_t number = map_.find(handle);
  if (number == RecordMap::kNone) return;
  map_.erase(handle);
  --places_[number / layout_.records_per_segment()].live;
  --live_;
}

const char* RecordLog::in_memory(int64_t number) const {
  const int64_t place = number / layout_.records_per_segment();
  const int64_t k = number - first_record(place);
  const int64_t offset = layout_.offset(k);
  if (place == head_ && k < next_ && offset >= buffer_page_ * kPageBytes) {
    return buffer_->data() + (offset - buffer_page_ * kPageBytes);
  }
  return writes_.find(slab_, places_[place].file.number, offset);
}

BlockRead RecordLog::block(int64_t number, char* to) const {
  const int64_t place = number / layout_.records_per_segment();
  const int64_t offset = layout_.offset(number % layout_.records_per_segment());
  const int file = files_.descriptor(slab_, places_[place].file);
  return {file, offset / kPageBytes * kPageBytes, to, block_bytes()};
}

int64_t RecordLog::offset_in_block(int64_t number) const {
  return layout_.offset(number % layout_.records_per_segment()) % kPageBytes;
}

std::string RecordLog::place_of(int64_t number, int64_t id) const {
  const int64_t place = number / layout_.records_per_segment();
  return "offset " + std::to_string(layout_.offset(number % layout_.records_per_segment())) +
         " of " + files_.name(slab_, places_[place].file.number) + " (id " + std::to_string(id) +
         ")";
}

std::string RecordLog::fault(const char* record, int64_t number, int64_t handle, int64_t id) const {
  RecordHeader header;
  std::memcpy(&header, record, sizeof(header));
  const uint32_t crc = crc32c(0, record + sizeof(header.crc),
                              static_cast<size_t>(layout_.record) - sizeof(header.crc));
  if (header.crc != crc) {
    return "dynemb: the record at " + place_of(number, id) +
           " is damaged: its checksum does not fit its bytes. It has not been used. Load a "
           "snapshot, and check the disk";
  }
  if (header.handle != handle || header.id != id) {
    return "dynemb: the record at " + place_of(number, id) + " is of id " +
           std::to_string(header.id) + ", handle " + std::to_string(header.handle) +
           ", expected handle " + std::to_string(handle) +
           ". It has not been used. Load a snapshot, and check the disk";
  }
  return "";
}

bool RecordLog::is_pinned(int64_t place) const {
  const int64_t number = places_[place].file.number;
  return pinned_.count(number) != 0 ||
         std::any_of(pins_.begin(), pins_.end(),
                     [&](const auto& pin) { return pin.second.files.count(number) != 0; });
}

void RecordLog::pin(std::set<int64_t> numbers) {
  pinned_ = std::move(numbers);
  count_pinned();
}

void RecordLog::count_pinned() {
  std::set<int64_t> kept = pinned_;
  for (const auto& pin : pins_) kept.insert(pin.second.files.begin(), pin.second.files.end());
  pinned_there_ = 0;
  for (const int64_t number : kept) {
    pinned_there_ += static_cast<int64_t>(files_.numbers(slab_).count(number));
  }
}

void RecordLog::pin_rows(int64_t number) {
  Pin pin{map_.entries(), {}};
  for (const Place& place : places_) {
    if (place.live > 0) pin.files.insert(place.file.number);
  }
  pins_.emplace(number, std::move(pin));
  count_pinned();
}

void RecordLog::release(int64_t number) {
  pins_.erase(number);
  count_pinned();
}

int64_t RecordLog::find_pinned(int64_t number, int64_t handle) const {
  const std::vector<int64_t>& entries = pins_.at(number).entries;
  const int64_t row = handle_row(handle);
  if (row < 0 || row >= static_cast<int64_t>(entries.size()) || entries[row] == 0)
    return RecordMap::kNone;
  return handle_generation(entries[row]) == handle_generation(handle) ? handle_row(entries[row])
                                                                      : RecordMap::kNone;
}

void RecordLog::delete_others() {
  std::set<int64_t> own = pinned_;
  for (const Place& place : places_) own.insert(place.file.number);
  for (const SegmentFile& file : free_) own.insert(file.number);
  const std::set<int64_t> there = files_.numbers(slab_);
  for (const int64_t number : there) {
    if (own.count(number) == 0) files_.remove(slab_, number);
  }
}

void RecordLog::recycle(int64_t place) {
  SegmentFile file = places_[place].file;
  writes_.wait_for(slab_, file.number);
  places_[place] = Place();
  --used_;
  files_.rename(slab_, file, slab_);
  free_.push_back(file);
}

int64_t RecordLog::holding_segments() const {
  return std::count_if(places_.begin(), places_.end(),
                       [](const Place& place) { return place.live > 0; });
}

std::vector<int64_t> RecordLog::live_segments() const {
  std::vector<int64_t> segments;
  for (size_t place = 1; place < places_.size(); ++place) {
    if (places_[place].live == 0) continue;
    segments.push_back(static_cast<int64_t>(place));
    segments.push_back(places_[place].file.number);
  }
  return segments;
}

RecordLog::Restored RecordLog::open_snapshot(const std::vector<int64_t>& entries,
                                             const std::vector<int64_t>& segments) const {
  const int64_t a_segment = layout_.records_per_segment();
  const std::string slab = files_.name(slab_, 0);
  DYNEMB_CHECK(static_cast<int64_t>(entries.size()) <= map_.max_rows(), "dynemb: records of ", slab,
               " has ", entries.size(), " rows, expected at most ", map_.max_rows());
  DYNEMB_CHECK(segments.size() % 2 == 0, "dynemb: segments of ", slab, " has ", segments.size(),
               " numbers, expected pairs");
  Restored state;
  // A snapshot's places may have gaps. They are closed, so that a file's numbers do not determine
  // memory sizes.
  std::unordered_map<int64_t, int64_t> places;
  for (size_t i = 0; i < segments.size(); i += 2) {
    const int64_t place = segments[i];
    DYNEMB_CHECK(place > 0 && place < (int64_t{1} << kRecordBits) / a_segment,
                 "dynemb: segments of ", slab, " has place ", place);
    const bool is_new = places.emplace(place, static_cast<int64_t>(i / 2) + 1).second;
    DYNEMB_CHECK(is_new, "dynemb: segments of ", slab, " has place ", place, " twice");
  }
  state.live.assign(segments.size() / 2, 0);
  state.entries.reserve(entries.size());
  for (size_t row = 0; row < entries.size(); ++row) {
    state.entries.push_back(0);
    if (entries[row] == 0) continue;
    const int64_t number = handle_row(entries[row]);
    const auto place = places.find(number / a_segment);
    DYNEMB_CHECK(number >= 0 && place != places.end(), "dynemb: records of ", slab, " leads row ",
                 row, " to place ", number / a_segment, ", which is not among the segments");
    state.entries.back() = make_handle(place->second * a_segment + number % a_segment,
                                       handle_generation(entries[row]));
    ++state.live[place->second - 1];
  }
  for (size_t i = 1; i < segments.size(); i += 2) {
    state.segments.push_back(files_.open(slab_, segments[i]));
  }
  return state;
}

void RecordLog::restore(const Restored& state) {
  writes_.wait_for_all();
  std::set<int64_t> written;
  for (size_t place = 1; place < places_.size(); ++place) {
    if (places_[place].state == PlaceState::kVacant) continue;
    written.insert(places_[place].file.number);
  }
  places_.assign(1, Place());
  used_ = live_ = head_ = next_ = 0;
  std::set<int64_t> pinned = pinned_;
  for (size_t i = 0; i < state.segments.size(); ++i) {
    const SegmentFile& file = state.segments[i];
    places_.push_back({file, PlaceState::kSealed, state.live[i], false});
    pinned.insert(file.number);  // the snapshot stays until keep() omits it
    live_ += state.live[i];
    ++used_;
  }
  map_.assign(state.entries);
  pin(std::move(pinned));
  for (const int64_t number : written) {
    if (pinned_.count(number) == 0) files_.remove(slab_, number);
  }
}

}  // namespace dynemb::cpu
