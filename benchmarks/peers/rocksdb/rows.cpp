// Rows of fixed size by id in RocksDB, with the settings that read and overwrite them fastest.
#include <rocksdb/cache.h>
#include <rocksdb/db.h>
#include <rocksdb/filter_policy.h>
#include <rocksdb/statistics.h>
#include <rocksdb/table.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr int64_t kAtOnce = 64;  // rows of a MultiGet

struct Rows {
  std::unique_ptr<rocksdb::DB> db;
  std::shared_ptr<rocksdb::Statistics> statistics;
  int64_t bytes;  // of a row
};

rocksdb::Slice key_of(const int64_t* id) {
  return {reinterpret_cast<const char*>(id), sizeof(int64_t)};
}

rocksdb::Options fast_options(int64_t cache_bytes) {
  rocksdb::Options options;
  options.create_if_missing = true;
  options.compression = rocksdb::kNoCompression;
  options.use_direct_reads = true;  // as ours: what is read is not in memory
  options.use_direct_io_for_flush_and_compaction = true;
  options.write_buffer_size = 64 << 20;
  options.max_write_buffer_number = 4;
  options.max_background_jobs = 4;
  options.level_compaction_dynamic_level_bytes = true;
  options.optimize_filters_for_hits = true;
  options.max_open_files = -1;
  options.statistics = rocksdb::CreateDBStatistics();
  options.statistics->set_stats_level(rocksdb::StatsLevel::kExceptDetailedTimers);
  rocksdb::BlockBasedTableOptions table;
  table.block_size = 4096;
  table.block_cache = rocksdb::NewLRUCache(static_cast<size_t>(cache_bytes));
  table.filter_policy.reset(rocksdb::NewBloomFilterPolicy(10));
  options.table_factory.reset(rocksdb::NewBlockBasedTableFactory(table));
  return options;
}

// Reads rows from `begin` to `end`; returns how many there are.
int64_t read_part(Rows* rows, const int64_t* ids, char* out, int64_t begin, int64_t end) {
  int64_t found = 0;
  rocksdb::ReadOptions options;
  std::vector<rocksdb::Slice> keys(kAtOnce);
  std::vector<rocksdb::PinnableSlice> values(kAtOnce);
  std::vector<rocksdb::Status> statuses(kAtOnce);
  for (; begin < end; begin += kAtOnce) {
    const int64_t count = std::min(kAtOnce, end - begin);
    for (int64_t i = 0; i < count; ++i) keys[static_cast<size_t>(i)] = key_of(ids + begin + i);
    rows->db->MultiGet(options, rows->db->DefaultColumnFamily(), static_cast<size_t>(count),
                       keys.data(), values.data(), statuses.data());
    for (int64_t i = 0; i < count; ++i) {
      auto& value = values[static_cast<size_t>(i)];
      if (statuses[static_cast<size_t>(i)].ok()) {
        std::memcpy(out + (begin + i) * rows->bytes, value.data(), value.size());
        ++found;
      }
      value.Reset();
    }
  }
  return found;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

void* dynemb_rocksdb_open(const char* path, int64_t bytes, int64_t cache_bytes) {
  auto rows = std::make_unique<Rows>();
  rocksdb::DB* db = nullptr;
  const rocksdb::Options options = fast_options(cache_bytes);
  if (!rocksdb::DB::Open(options, path, &db).ok()) return nullptr;
  rows->db.reset(db);
  rows->statistics = options.statistics;
  rows->bytes = bytes;
  return rows.release();
}

void dynemb_rocksdb_close(void* opened) { delete static_cast<Rows*>(opened); }

// Without a log of its own: rows of ours, too, are durable only when a snapshot says so.
int dynemb_rocksdb_write(void* opened, const int64_t* ids, const char* records, int64_t count) {
  auto* rows = static_cast<Rows*>(opened);
  rocksdb::WriteBatch batch;
  for (int64_t i = 0; i < count; ++i) {
    const rocksdb::Slice value(records + i * rows->bytes, static_cast<size_t>(rows->bytes));
    if (!batch.Put(key_of(ids + i), value).ok()) return 0;
  }
  rocksdb::WriteOptions options;
  options.disableWAL = true;
  return rows->db->Write(options, &batch).ok() ? 1 : 0;
}

int64_t dynemb_rocksdb_read(void* opened, const int64_t* ids, char* out, int64_t count,
                            int64_t threads) {
  auto* rows = static_cast<Rows*>(opened);
  if (threads == 1) return read_part(rows, ids, out, 0, count);
  std::atomic<int64_t> next{0}, found{0};
  std::vector<std::thread> readers;
  for (int64_t t = 0; t < threads; ++t) {
    readers.emplace_back([&] {
      for (int64_t begin; (begin = next.fetch_add(kAtOnce)) < count;) {
        found += read_part(rows, ids, out, begin, std::min(begin + kAtOnce, count));
      }
    });
  }
  for (std::thread& reader : readers) reader.join();
  return found;
}

// Waits until there is nothing left to compact.
int dynemb_rocksdb_settle(void* opened) {
  auto* rows = static_cast<Rows*>(opened);
  if (!rows->db->Flush({}).ok()) return 0;
  return rows->db->CompactRange({}, nullptr, nullptr).ok() ? 1 : 0;
}

// Waits for flushes and compactions that have begun or are due.
void dynemb_rocksdb_drain(void* opened) {
  rocksdb::DB* db = static_cast<Rows*>(opened)->db.get();
  const auto busy = [db] {
    for (const char* property : {"rocksdb.mem-table-flush-pending", "rocksdb.num-running-flushes",
                                 "rocksdb.compaction-pending", "rocksdb.num-running-compactions"}) {
      uint64_t count = 0;
      if (db->GetIntProperty(property, &count) && count != 0) return true;
    }
    return false;
  };
  while (busy()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

// Bytes that flushes and compactions have written since it was opened.
int64_t dynemb_rocksdb_written(void* opened) {
  auto* rows = static_cast<Rows*>(opened);
  return static_cast<int64_t>(rows->statistics->getTickerCount(rocksdb::FLUSH_WRITE_BYTES) +
                              rows->statistics->getTickerCount(rocksdb::COMPACT_WRITE_BYTES));
}

// Bytes of its files.
int64_t dynemb_rocksdb_disk(void* opened) {
  uint64_t bytes = 0;
  static_cast<Rows*>(opened)->db->GetIntProperty("rocksdb.total-sst-files-size", &bytes);
  return static_cast<int64_t>(bytes);
}

}  // extern "C"
#pragma GCC visibility pop
