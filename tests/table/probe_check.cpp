// Threads look for ids in a bucket while another one removes ids from it and puts others in.
//
//   probe_check READS
//
// The bucket was full once and stays so to readers: none may see an empty slot. An id is found with
// a handle that only it has had, and lasting ids are always found. Prints how many reads broke
// which rule.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "cpu/index/moving_entries.h"
#include "cpu/index/probe_block.h"

namespace {

using namespace dynemb;
using namespace dynemb::cpu;

constexpr int64_t kIds[] = {0, 21, 22};  // they take turns in slot 0
constexpr int64_t kLasting[] = {11, 12, 13};

int64_t stored_of(int64_t id, int64_t change) { return (change << 8 | id) + 1; }
bool is_of(int64_t stored, int64_t id) { return ((stored - 1) & 0xff) == id; }

struct World {
  alignas(64) int64_t line[kBucketWords] = {};
  Moves fills;  // of slots: others clear some meanwhile, as threads of one op do
  std::atomic<bool> ended{false};
  std::atomic<int64_t> reads{0}, empty{0}, foreign{0}, missing{0};

  void check(int64_t id, int64_t stored, bool lasting) {
    if (stored != 0 && !is_of(stored, id)) ++foreign;
    if (stored == 0 && lasting) ++missing;
  }
};

void read_until_ended(World& world) {
  const int64_t ids[] = {kIds[0], kIds[1], kLasting[0], kIds[2]};
  const int64_t buckets[4] = {};
  while (!world.ended) {
    for (int i = 0; i < 100; ++i) {
      for (int j = 0; j < 10; ++j) {
        const uint64_t before = world.fills.word();
        const bool empty = has_empty_slot(world.line);
        world.empty += empty && !Moves::in_progress(before) && world.fills.unchanged(before);
      }
      Words4 four;
      int64_t one[4];
      bool empty = false;
      read_unmoved(world.line, [&] {
        empty = has_empty_slot(world.line);
        four = match_four(world.line, buckets, ids);
        for (int j = 0; j < 4; ++j) one[j] = match_stored(world.line, ids[j]);
      });
      world.empty += empty;
      for (int j = 0; j < 4; ++j) {
        world.check(ids[j], four[j], j == 2);
        world.check(ids[j], one[j], j == 2);
      }
    }
    world.reads += 100;
  }
}

void change_until(World& world, int64_t reads) {
  const TableView table{world.line, nullptr, 0, 1, 0, false, 0};
  for (int64_t k = 1; world.reads < reads; ++k) {
    {
      const MovingEntries moving(world.line);
      clear_slot(table, 0, 0);
    }
    std::this_thread::yield();  // readers meet the slot without an id, too
    const int64_t id = kIds[k % 3];
    world.fills.begin();
    fill_slot(world.line, world.line, 0, id, stored_of(id, k));
    world.fills.end();
    std::this_thread::yield();
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  World world;
  fill_slot(world.line, world.line, 0, kIds[0], stored_of(kIds[0], 0));
  for (int64_t slot = 1; slot < kBucketWidth; ++slot) {
    fill_slot(world.line, world.line, slot, kLasting[slot - 1], stored_of(kLasting[slot - 1], 0));
  }
  std::vector<std::thread> readers;
  for (int r = 0; r < 2; ++r) readers.emplace_back([&] { read_until_ended(world); });
  change_until(world, std::atoll(argv[1]));
  world.ended = true;
  for (std::thread& reader : readers) reader.join();
  std::printf("{\"reads\": %ld, \"empty\": %ld, \"foreign\": %ld, \"missing\": %ld}\n",
              world.reads.load(), world.empty.load(), world.foreign.load(), world.missing.load());
  return 0;
}
