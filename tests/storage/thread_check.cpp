// A row store under ThreadSanitizer: one thread plans, stages, prefetches and changes rows as
// lookups and optimizers do, while the storage thread saves, loads and collects, and a third one
// asks for figures, and a fourth one reads pinned rows. Every row that is used is compared
// with what was written last.
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/columns.h"
#include "core/index/handle.h"
#include "core/storage/cache.h"
#include "core/storage/crc32c.h"
#include "core/storage/record.h"
#include "cpu/index/args.h"
#include "cpu/memory/reserve.h"
#include "cpu/serving/row_cache.h"
#include "cpu/storage/cache.h"
#include "cpu/storage/crc32c.h"
#include "cpu/storage/row_store.h"

namespace dynemb::cpu {

// What the store takes from elsewhere, without ops, torch's threads and the machine's memory.
uint32_t crc32c(uint32_t crc, const void* data, size_t bytes) {
  return ~crc32c_by_tables(~crc, static_cast<const unsigned char*>(data), bytes);
}
std::vector<Tile> make_tiles(const FeatureArgs& features) { return {{0, features.count, 0, 0}}; }
void check_available_memory(const char*, int64_t) {}

}  // namespace dynemb::cpu

using namespace dynemb;
using namespace dynemb::cpu;

namespace {

constexpr int64_t kRows = 6000;
constexpr int64_t kSlots = 256;
constexpr int64_t kDim = 12;
constexpr int64_t kBatch = 60;
constexpr int64_t kSegmentBytes = 64 << 10;
constexpr int64_t kDiskBytes = 32 * kSegmentBytes;

void expect(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "thread_check: %s\n", what);
  std::exit(1);
}

int64_t handle_of(int64_t row) { return make_handle(row, 1); }

class Trainer {
 public:
  Trainer(const std::string& path, IoPath io)
      : places_(kRows),
        slots_(kRows * kSlotColumns),
        free_slots_(kRows),
        head_(kTierColumns),
        clock_(kTierColumns),
        weights_(kRows * kDim),
        state_(kRows),
        generations_(kRows),
        expected_(kRows) {
    head_[kTierEpoch] = 1;
    clock_[kTierLimit] = kSlots;
    clock_[kTierSlotBytes] = 64;
    tiers_ = {{{places_.data(), kRows, slots_.data(), free_slots_.data(), clock_.data()}},
              head_.data()};
    CachedSlab slab;
    slab.parts = {{reinterpret_cast<char*>(weights_.data()), kDim * 4},
                  {reinterpret_cast<char*>(state_.data()), 4}};
    slab.generations = generations_.data();
    slab.max_rows = kRows;
    slab.name = "rows";
    store_ = RowStore::open({path, kSegmentBytes, kDiskBytes, io}, {slab});
  }

  RowStore& store() { return *store_; }

  // Brings rows into the cache: now, or for a step to come.
  std::vector<int64_t> stage(const std::vector<int64_t>& rows, int64_t ahead) {
    std::vector<int64_t> handles;
    for (const int64_t row : rows) handles.push_back(handle_of(row));
    FeatureArgs features{rows.data(),
                         static_cast<int64_t>(rows.size()),
                         {0, static_cast<int64_t>(rows.size())},
                         {0}};
    const Jobs jobs{store_->jobs_done(), store_->jobs_submitted() + 1,
                    [this](size_t slab, int64_t h) { return store_->has_record(slab, h); },
                    [this](size_t slab, int64_t h) { store_->prefetch_record(slab, h); }};
    const auto epoch = static_cast<uint32_t>(head_[kTierEpoch] + ahead);
    const StageCall call{"thread_check",
                         &tiers_,
                         &features,
                         {0},
                         handles.data(),
                         ahead == 0,
                         true,
                         epoch,
                         ahead == 0 ? kTierMisses : kTierPrefetched,
                         &jobs};
    std::vector<int64_t> staged(rows.size());
    Plan plan = plan_moves(
        call, [this](const std::vector<int64_t>& n) { store_->reserve_space(n); }, staged.data());
    if (!plan.moves[0].saves.empty() || !plan.moves[0].loads.empty()) {
      store_->submit(std::move(plan.moves));
    }
    if (ahead == 0) store_->wait_for(plan.wait_for);
    return staged;
  }

  // A lookup and its update.
  void step(const std::vector<int64_t>& rows) {
    const std::vector<int64_t> staged = stage(rows, 0);
    for (size_t i = 0; i < rows.size(); ++i) {
      const int64_t slot = handle_row(staged[i]);
      const int32_t generation = handle_generation(staged[i]);
      float* row = weights_.data() + slot * kDim;
      const int64_t before = expected_[rows[i]];
      if (before == 0) {
        expect(generations_[slot] != generation, "an unwritten row is there");
      } else {
        expect(generations_[slot] == generation, "a row is not there");
        expect(state_[slot] == before, "the state of a row is another one's");
        for (int64_t d = 0; d < kDim; ++d) {
          expect(row[d] == static_cast<float>(before * 100 + d), "a row is another one");
        }
      }
      expected_[rows[i]] = before + 1 + rows[i] % 7;
      state_[slot] = static_cast<int32_t>(expected_[rows[i]]);
      for (int64_t d = 0; d < kDim; ++d) {
        row[d] = static_cast<float>(expected_[rows[i]] * 100 + d);
      }
      generations_[slot] = generation;
    }
    ++head_[kTierEpoch];
  }

  // What has changed goes to the log.
  void save() {
    std::vector<RowMove> saves = take_dirty(tiers_, tiers_.slabs[0], 0, kRows);
    store_->reserve_space({static_cast<int64_t>(saves.size())});
    store_->submit({{std::move(saves), {}}});
  }

  // A thread that reads what there is now while steps follow, and lets it go.
  std::thread reader() {
    save();
    return std::thread([store = store_, pinned = expected_, pin = store_->pin()] {
      std::vector<RowMove> rows;
      for (int64_t row = 0; row < kRows; ++row) rows.push_back({0, handle_of(row), row, 0, 0});
      const int64_t bytes = record_bytes(kDim * 4 + 4);
      std::vector<char> records(kBatch * bytes);
      std::vector<uint8_t> found(kBatch);
      for (int64_t begin = 0; begin < kRows; begin += kBatch) {
        store->read_pinned(pin, 0, {rows.begin() + begin, rows.begin() + begin + kBatch},
                           records.data(), found.data());
        for (int64_t i = 0; i < kBatch; ++i) {
          const int64_t value = pinned[begin + i];
          expect((found[i] != 0) == (value != 0), "an unwritten row is pinned");
          if (value == 0) continue;
          float first = 0;
          std::memcpy(&first, records.data() + i * bytes + sizeof(RecordHeader), sizeof(first));
          expect(first == static_cast<float>(value * 100), "a pinned row has changed");
        }
      }
      store->release(pin);
    });
  }

  std::vector<SlabSnapshot> snapshot() {
    save();
    saved_ = expected_;
    std::vector<SlabSnapshot> snapshot = store_->sync();
    std::vector<int64_t> files;
    for (size_t i = 1; i < snapshot[0].segments.size(); i += 2) {
      files.push_back(snapshot[0].segments[i]);
    }
    store_->keep({files});
    return snapshot;
  }

  void load(const std::vector<SlabSnapshot>& snapshot) {
    store_->load(snapshot);
    shrink(tiers_.slabs[0], 0);
    std::fill(places_.begin(), places_.end(), 0);
    expected_ = saved_;
  }

 private:
  std::vector<int32_t> places_;
  std::vector<int64_t> slots_;
  std::vector<int32_t> free_slots_;
  std::vector<int64_t> head_;
  std::vector<int64_t> clock_;
  std::vector<float> weights_;
  std::vector<int32_t> state_;
  std::vector<int32_t> generations_;
  std::vector<int64_t> expected_;  // by row, how far it has come; 0: unwritten
  std::vector<int64_t> saved_;
  TierTensors tiers_;
  std::shared_ptr<RowStore> store_;
};

// Distinct rows, of which some come often.
std::vector<int64_t> batch(std::mt19937& draw) {
  std::map<int64_t, bool> seen;
  std::uniform_real_distribution<double> uniform(0, 1);
  std::vector<int64_t> rows;
  while (static_cast<int64_t>(rows.size()) < kBatch) {
    const double u = uniform(draw);
    const auto row = static_cast<int64_t>(u * u * kRows);
    if (seen.emplace(row, true).second) rows.push_back(row);
  }
  return rows;
}

void run(const std::string& path, IoPath io, int steps) {
  std::filesystem::remove_all(path);
  Trainer trainer(path, io);
  std::atomic<bool> ends{false};
  std::thread watcher([&] {
    while (!ends) {
      trainer.store().stats();
      trainer.store().idle();
      trainer.store().check();
      std::this_thread::yield();
    }
  });
  std::mt19937 draw(5);
  std::vector<SlabSnapshot> last;
  std::vector<int64_t> rows = batch(draw);
  std::thread reader;
  for (int step = 0; step < steps; ++step) {
    trainer.step(rows);
    rows = batch(draw);
    if (step % 3 != 0) trainer.stage(rows, 1);
    if (step % 60 == 30) reader = trainer.reader();
    if (step % 60 == 58) reader.join();
    if (step % 50 == 49) last = trainer.snapshot();
    if (step % 120 == 119) trainer.load(last);
  }
  if (reader.joinable()) reader.join();
  const StoreStats stats = trainer.store().stats();
  ends = true;
  watcher.join();
  trainer.store().drain();
  expect(stats.reads > 0 && stats.writes > 0, "nothing was read or written");
  expect(stats.collected > 0, "nothing was collected");
  std::printf("%s: %lld steps, %lld rows read, %lld written, %lld collected\n",
              io == IoPath::kThreads ? "threads" : "auto", static_cast<long long>(steps),
              static_cast<long long>(stats.reads), static_cast<long long>(stats.writes),
              static_cast<long long>(stats.collected));
}

}  // namespace

// Threads read and fill a cache of rows, while its rows become those of one file after another. All
// bytes of a row are its key; those of the first keys change from file to file.
void share_cached_rows(int steps) {
  constexpr int64_t kChanging = 10;
  const auto byte_of = [](int64_t key, int64_t file) {
    return static_cast<char>(key < kChanging ? key + 37 * file : key);
  };
  RowCache cache(64, 40);
  std::atomic<bool> is_right{true};
  std::atomic<int64_t> current{0};
  std::vector<std::thread> threads;
  for (uint32_t seed = 0; seed < 4; ++seed) {
    threads.emplace_back([&, seed] {
      std::mt19937 random(seed);
      char row[40];
      for (int i = 0; i < 100 * steps; ++i) {
        const int64_t file = current.load();
        const auto key = static_cast<int64_t>(random() % (random() % 4 == 0 ? 250 : 50));
        const RowCache::Search wanted = cache.begin(key);
        cache.fetch_row(wanted);
        if (cache.copy(wanted, row, file)) {
          for (const char byte : row) {
            if (byte != byte_of(key, file)) is_right = false;
          }
        } else {
          std::memset(row, byte_of(key, file), sizeof row);
          cache.put(key, row, file);
        }
      }
    });
  }
  for (int64_t file = 1; file <= steps / 4; ++file) {
    char row[40];
    cache.begin_file(file);
    for (int64_t key = 0; key < kChanging; ++key) {
      std::memset(row, byte_of(key, file), sizeof row);
      cache.replace(key, row, file);
    }
    current = file;
    std::this_thread::yield();
  }
  for (std::thread& thread : threads) thread.join();
  expect(is_right, "a row of the cache has the bytes of its key and file");
}

int main(int count, char** arguments) {
  expect(count == 3, "expected a directory and a number of steps");
  const int steps = std::atoi(arguments[2]);
  for (const IoPath io : {IoPath::kThreads, IoPath::kAuto}) {
    run(std::string(arguments[1]) + "/store", io, steps);
  }
  share_cached_rows(steps);
  return 0;
}
