// Holds: pinned states of the logs, read while the logs go on.
#include <string>
#include <vector>

#include "cpu/storage/store_worker.h"

namespace dynemb::cpu {
namespace {

[[noreturn]] void raise_no_hold(const std::string& path, int64_t hold) {
  throw Refusal("dynemb: hold is " + std::to_string(hold) + ", which path " + path +
                " does not have: it has been released, or is another store's");
}

}  // namespace

int64_t StoreWorker::hold() {
  finish_collection();  // it assumes the rest of the page, which a flush leaves empty
  compact_for_snapshot();
  const int64_t number = ++last_hold_;
  for (size_t s = 0; s < logs_.size(); ++s) {
    if (!logs_[s]) continue;
    logs_[s]->flush();
    logs_[s]->hold(number);
    publish(s);
  }
  return number;
}

void StoreWorker::read_held(int64_t hold, size_t s, const std::vector<RowMove>& rows, char* records,
                            uint8_t* found) {
  const RecordLog& log = *logs_[s];
  if (!log.has_hold(hold)) raise_no_hold(options_.path, hold);
  read_found(s, rows, [&](int64_t handle) { return log.find_held(hold, handle); }, records, found);
}

void StoreWorker::release(int64_t hold) {
  for (const auto& log : logs_) {
    if (!log) continue;
    if (!log->has_hold(hold)) raise_no_hold(options_.path, hold);
    log->release(hold);
  }
}

}  // namespace dynemb::cpu
