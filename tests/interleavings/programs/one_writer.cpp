// The lock of a table, for one op and through several, and calls that read beside it:
// csrc/cpu/index/one_writer.h.
#include "cpu/index/one_writer.cpp"  // lock_memory is not in the header

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "checker.h"

namespace {

using namespace dynemb::cpu;
using interleavings::Access;
using interleavings::require;

alignas(64) char counters[64];  // the address that is locked
alignas(64) int64_t plain[2];   // changed in the lock only
alignas(64) int64_t rows[2];    // read without a lock

const int64_t kAddress = reinterpret_cast<int64_t>(counters);

// An op; false if it was refused.
bool change(OneWriter::Others others = OneWriter::Others::kRaise) {
  try {
    const OneWriter writer("op", counters, others);
    const int64_t value = plain[0];
    plain[0] = value + 1;
    plain[1] = value + 1;
    return true;
  } catch (const std::runtime_error&) {
    return false;
  }
}

// A change of several ops that moves rows; false if it was refused.
bool change_often() {
  try {
    lock_memory({kAddress}, true);
  } catch (const std::runtime_error&) {
    return false;
  }
  for (int64_t k = 1; k <= 2; ++k) {
    require(change(), "a thread's own op is refused");
    const int64_t values[2] = {k, k};
    std::memcpy(rows, values, sizeof values);
  }
  unlock_memory({kAddress}, true);
  return true;
}

void read() {
  int64_t values[2];
  try {
    read_between_moves("lookup", counters, [&] { std::memcpy(values, rows, sizeof values); });
  } catch (const std::runtime_error&) {
    return;  // rows were moving
  }
  require(values[0] == values[1] && values[0] % 2 == 0, "a call has rows of amid a change");
}

int done[3];

interleavings::Execution begin() {
  std::fill(std::begin(plain), std::end(plain), 0);
  std::fill(std::begin(rows), std::end(rows), 0);
  std::fill(std::begin(done), std::end(done), 0);
  interleavings::share(plain, sizeof plain, Access::kGuarded);
  interleavings::share(rows, sizeof rows, Access::kRacing);
  return {{}, [] {
            require(plain[0] == done[0] + done[1] + done[2], "a change is lost");
            require(!has_writer(counters), "a lock is left behind");
          }};
}

// Two ops and one that others wait for.
interleavings::Execution ops() {
  interleavings::Execution execution = begin();
  execution.threads = {[] { done[0] = change(); }, [] { done[1] = change(); },
                       [] { done[2] = change(OneWriter::Others::kWait); }};
  return execution;
}

// A change of several ops beside an op and a call that reads.
interleavings::Execution moves() {
  interleavings::Execution execution = begin();
  execution.threads = {[] { done[0] = 2 * change_often(); }, [] { done[1] = change(); }, read};
  return execution;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string scene = argc > 1 ? argv[1] : "";
  return interleavings::explore(argc - 1, argv + 1, scene == "ops" ? ops : moves);
}
