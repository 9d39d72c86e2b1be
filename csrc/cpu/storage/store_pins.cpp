// Pins: states of the logs at one time, read while the logs go on.
#include <string>
#include <vector>

#include "cpu/storage/store_worker.h"

namespace dynemb::cpu {
namespace {

[[noreturn]] void raise_no_pin(const std::string& path, int64_t pin) {
  throw Refusal("dynemb: pin is " + std::to_string(pin) + ", which path " + path +
                " does not have: it has been released, or is another store's");
}

}  // namespace

int64_t StoreWorker::pin() {
  finish_collection();  // it assumes the rest of the page, which a flush leaves empty
  compact_for_snapshot();
  const int64_t number = ++last_pin_;
  for (size_t s = 0; s < logs_.size(); ++s) {
    if (!logs_[s]) continue;
    logs_[s]->flush();
    logs_[s]->pin_rows(number);
    publish(s);
  }
  pending_.wait_for_all();  // a failed write is an error of the pin, not of a later read
  return number;
}

void StoreWorker::read_pinned(int64_t pin, size_t s, const std::vector<RowMove>& rows,
                              char* records, uint8_t* found) {
  const RecordLog& log = *logs_[s];
  if (!log.has_pin(pin)) raise_no_pin(options_.path, pin);
  read_found(s, rows, [&](int64_t handle) { return log.find_pinned(pin, handle); }, records, found);
}

void StoreWorker::release(int64_t pin) {
  for (const auto& log : logs_) {
    if (!log) continue;
    if (!log->has_pin(pin)) raise_no_pin(options_.path, pin);
    log->release(pin);
  }
}

}  // namespace dynemb::cpu
