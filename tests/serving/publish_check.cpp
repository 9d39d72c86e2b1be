// Reads rows of a live table that another thread has written, ordered by nothing but the table.
//
// Rows do not change while they are read, so that a reader need not look whether they have: its
// copies are not atomic. ThreadSanitizer reports them unless each row is read after its handle. The
// rows are those of updates, in which only a handle changes.
#include <atomic>
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

#include "cpu/serving/live_codes.h"
#include "cpu/serving/live_reader.h"
#include "cpu/serving/live_writer.h"

namespace {

using namespace dynemb;
using namespace dynemb::cpu;

constexpr int64_t kCount = 4;  // of a vector: no fence of later ids follows
constexpr int64_t kDim = 16;
constexpr int64_t kIds[kCount] = {5, 0, -7, 9};

struct Rows {
  float values[kCount][kDim] = {};
  void take(int64_t first, const char* const* row, int64_t count, bool) {
    for (int64_t i = 0; i < count; ++i) {
      if (row[i] != nullptr) std::memcpy(values[first + i], row[i], sizeof values[first + i]);
    }
  }
};

void write(const LiveWriter& writer, float value) {
  const int64_t words = writer.table.row_words;
  const std::vector<float> row(kDim, value);
  std::vector<int64_t> packed(kCount * words);
  for (int64_t i = 0; i < kCount; ++i) {
    pack_live_row(Storage::kFloat32, row.data(), kDim, packed.data() + i * words);
  }
  apply_live(writer, {kIds, kCount, packed.data(), nullptr, 0});
}

}  // namespace

int main() {
  const int64_t buckets = buckets_for(kCount);
  const int64_t words = live_row_words(Storage::kFloat32, kDim);
  std::vector<int64_t> lines(2 * buckets * kBucketWords), rows(3 * kCount * words);
  std::vector<int64_t> counters(kLiveTableColumns), slab(kLiveSlabColumns);
  counters[kLiveTableCapacity] = kCount;
  const LiveTable table{lines.data(),   buckets,     counters.data(),
                        bucket_salt(7), rows.data(), 3 * kCount,
                        words,          kDim,        Storage::kFloat32};
  std::atomic<bool> written{false};
  int64_t right = 0;
  std::thread reader([&] {
    while (!written.load(std::memory_order_relaxed)) std::this_thread::yield();
    Rows read;
    std::vector<char> slots(kLiveSlots * live_slot_bytes(table));
    read_live<false>(table, kIds, kCount, slots.data(), read);
    for (const auto& row : read.values) right += row[0] == 2.0f && row[kDim - 1] == 2.0f;
  });
  write({table, counters.data(), slab.data()}, 1.0f);
  write({table, counters.data(), slab.data()}, 2.0f);
  written.store(true, std::memory_order_relaxed);
  reader.join();
  std::printf("{\"right\": %ld}\n", right);
  return 0;
}
