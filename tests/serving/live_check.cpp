// Threads read a live table while another one updates it, and look whether each row that they get
// is one that the table had for its id at that time.
//
//   live_check READS VALIDATED DIM
//
// All columns of a row are a function of (id, version), so a row that is made of two, or that is
// another id's, shows. The writer says of each id which version it has, and when it is about to
// change: where that is the same before and after a read, the reader must have got that very
// version; else at least that from before. An id that is never erased is never missing. With
// VALIDATED 0 readers do not look whether a row was their id's and whole; it is there to show that
// this program would see it. Prints how many rows were wrong in which way.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "cpu/serving/live_codes.h"
#include "cpu/serving/live_reader.h"
#include "cpu/serving/live_writer.h"

namespace {

using namespace dynemb;
using namespace dynemb::cpu;

constexpr int64_t kIds = 1500;  // the first kLasting of them are always there
constexpr int64_t kLasting = 750;
constexpr int64_t kReaders = 3;
constexpr int64_t kBatch = 192;   // ids that a reader reads at once
constexpr int64_t kUpdates = 32;  // ids that the writer changes at once
constexpr int64_t kRehashEvery = 50;

int64_t id_of(int64_t number) { return static_cast<int64_t>(fmix64(number)) ^ 0x5bd1; }

float column(int64_t id, int64_t version, int64_t c) {
  if (c == 0) return static_cast<float>(version);
  const uint64_t word =
      static_cast<uint64_t>(id) + 0x9e3779b97f4a7c15ULL * static_cast<uint64_t>(version * 128 + c);
  return static_cast<float>((word * 0xd1b54a32d192ed03ULL) >> 40);
}

// What the writer says of an id: version << 2 | is there << 1 | is changing.
int64_t said(int64_t version, bool there, bool changing) {
  return version << 2 | static_cast<int64_t>(there) << 1 | static_cast<int64_t>(changing);
}

struct World {
  LiveTable table;
  std::vector<int64_t> lines, rows, counters, slab;
  std::vector<std::atomic<int64_t>> saying;
  std::atomic<bool> ended{false};
  std::atomic<int64_t> reads{0}, torn{0}, stale{0}, missing{0}, damaged{0};

  explicit World(int64_t dim) : counters(kLiveTableColumns), slab(kLiveSlabColumns), saying(kIds) {
    const int64_t buckets = buckets_for(kIds);
    const int64_t words = live_row_words(Storage::kFloat32, dim);
    lines.resize(2 * buckets * kBucketWords);
    rows.resize((kIds + 1) * words);
    counters[kLiveTableCapacity] = kIds;
    table = {lines.data(), buckets, counters.data(),  bucket_salt(7), rows.data(), kIds + 1,
             words,        dim,     Storage::kFloat32};
  }
  LiveWriter writer() { return {table, counters.data(), slab.data()}; }
};

struct Check {
  World& world;
  const int64_t* numbers;  // of the ids
  std::vector<char> slots;
  std::vector<float> rows;
  std::vector<bool> found;

  Check(World& world, const int64_t* numbers)
      : world(world),
        numbers(numbers),
        slots(kLiveSlots * live_slot_bytes(world.table)),
        rows(kBatch * world.table.dim),
        found(kBatch) {}
  void take(int64_t first, const char* const* row, int64_t count, bool) {
    for (int64_t i = 0; i < count; ++i) {
      found[first + i] = row[i] != nullptr;
      if (!found[first + i]) continue;
      std::memcpy(&rows[(first + i) * world.table.dim], row[i], 4 * world.table.dim);
    }
  }

  void judge(int64_t i, int64_t before, int64_t after) {
    const int64_t id = id_of(numbers[i]);
    const bool settled = before == after && (before & 1) == 0;
    if (!found[i]) {
      if (numbers[i] < kLasting || (settled && (before & 2) != 0)) ++world.missing;
      return;
    }
    const float* values = &rows[i * world.table.dim];
    const auto version = static_cast<int64_t>(values[0]);
    for (int64_t c = 0; c < world.table.dim; ++c) {
      if (values[c] != column(id, version, c)) {
        ++world.torn;
        return;
      }
    }
    if (settled ? (before & 2) == 0 || version != before >> 2 : version < before >> 2) {
      ++world.stale;
    }
  }
};

template <bool kValidated>
void read_until(World& world, int64_t reads, uint64_t seed) {
  int64_t numbers[kBatch] = {}, ids[kBatch], before[kBatch];
  Check check(world, numbers);
  for (uint64_t round = 0; world.reads.fetch_add(kBatch) < reads; ++round) {
    for (int64_t i = 0; i < kBatch; ++i) {
      numbers[i] = static_cast<int64_t>(fmix64(seed + round * kBatch + i) % kIds);
      ids[i] = id_of(numbers[i]);
      before[i] = world.saying[numbers[i]].load(std::memory_order_acquire);
    }
    if (read_live<kValidated>(world.table, ids, kBatch, check.slots.data(), check) >= 0)
      ++world.damaged;
    std::atomic_thread_fence(std::memory_order_acquire);
    for (int64_t i = 0; i < kBatch; ++i) {
      check.judge(i, before[i], world.saying[numbers[i]].load(std::memory_order_relaxed));
    }
  }
}

// One update after another: rows for some ids, of which a part were not there, and others go. A
// part of the ids that get rows are among those to take out, too.
void write_until_ended(World& world) {
  const LiveWriter writer = world.writer();
  const int64_t words = world.table.row_words, dim = world.table.dim;
  std::vector<int64_t> packed(kUpdates * words), ids, erased, numbers;
  std::vector<float> values(dim);
  const auto update = [&](int64_t version) {
    for (const int64_t number : numbers) {
      const int64_t old = world.saying[number].load();
      world.saying[number].store(old | 1);
    }
    std::atomic_thread_fence(std::memory_order_seq_cst);
    const auto count = static_cast<int64_t>(ids.size());
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t c = 0; c < dim; ++c) values[c] = column(ids[i], version, c);
      pack_live_row(Storage::kFloat32, values.data(), dim, packed.data() + i * words);
    }
    const LiveOutcome outcome = apply_live(writer, {ids.data(), count, packed.data(), erased.data(),
                                                    static_cast<int64_t>(erased.size())});
    if (outcome.wanted > outcome.free) std::abort();
    for (size_t i = 0; i < numbers.size(); ++i) {
      const bool there = static_cast<int64_t>(i) < count;  // numbers of ids come first
      world.saying[numbers[i]].store(said(version, there, false));
    }
  };
  for (int64_t first = 0; first < kLasting; ++first) {
    ids = {id_of(first)};
    numbers = {first};
    update(1);
  }
  for (int64_t version = 2; !world.ended; ++version) {
    if (version >= 1 << 22) std::abort();  // column 0 would not hold it
    ids.clear(), erased.clear(), numbers.clear();
    for (int64_t i = 0; i < kUpdates; ++i) {
      // of numbers that differ: the second half of them is taken out, where it may be
      const int64_t number =
          (static_cast<int64_t>(fmix64(version) % kIds) + i * (kIds / kUpdates)) % kIds;
      const bool goes = number >= kLasting && (version + i) % 2 == 0;
      (goes ? erased : ids).push_back(id_of(number));
      numbers.insert(goes ? numbers.end() : numbers.begin() + static_cast<int64_t>(ids.size()) - 1,
                     number);
    }
    for (size_t i = 0; i < ids.size(); i += 3) erased.push_back(ids[i]);
    update(version);
    if (version % kRehashEvery == 0) rehash_live(writer);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  const int64_t reads = std::atoll(argv[1]);
  const bool validated = std::atoi(argv[2]) != 0;
  World world(std::atoll(argv[3]));
  std::thread writer([&] { write_until_ended(world); });
  while (world.saying[kLasting - 1].load(std::memory_order_acquire) == 0) std::this_thread::yield();
  std::vector<std::thread> readers;
  for (int64_t r = 0; r < kReaders; ++r) {
    readers.emplace_back([&world, reads, validated, r] {
      const uint64_t seed = static_cast<uint64_t>(r) << 40;
      validated ? read_until<true>(world, reads, seed) : read_until<false>(world, reads, seed);
    });
  }
  for (std::thread& reader : readers) reader.join();
  world.ended = true;
  writer.join();
  std::printf("{\"torn\": %ld, \"stale\": %ld, \"missing\": %ld, \"damaged\": %ld, ",
              world.torn.load(), world.stale.load(), world.missing.load(), world.damaged.load());
  std::printf("\"reads\": %ld, \"writes\": %ld, \"rehashes\": %ld}\n", world.reads.load(),
              world.counters[kLiveTableInserted] + world.counters[kLiveTableUpdated],
              world.counters[kLiveTableActive]);
  return 0;
}
