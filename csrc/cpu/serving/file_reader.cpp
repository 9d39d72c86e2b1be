#include "cpu/serving/file_reader.h"

#include <mutex>
#include <string>
#include <vector>

#include "core/runtime/check.h"
#include "cpu/memory/reserve.h"
#include "cpu/runtime/parallel.h"

namespace dynemb::cpu {
namespace {

int64_t place_bytes(const FileTable& table) { return (table.row_bytes + 15) / 16 * 16; }

// What a thread needs for one tile after another.
struct TileMemory {
  std::vector<ChangedId> state;
  std::vector<int64_t> asked, numbers;  // ids that the file is asked for, and their rows there
  std::vector<int64_t> position;        // of these ids in the tile
  std::vector<FileRow> wanted;
};

// Finds the rows of a tile, and copies those in memory. Returns what is damaged.
std::string find_rows(const FileRows& from, const Tile& tile, const int64_t* ids, char* to,
                      const char** row, TileMemory& memory) {
  const int64_t count = tile.end - tile.begin;
  const int64_t stride = place_bytes(from.file.tables()[tile.table]);
  const int64_t* asked = ids;
  int64_t asked_count = count;
  if (from.changes != nullptr) {
    memory.state.resize(static_cast<size_t>(count));
    from.changes->read(tile.table, ids, count, to, stride, memory.state.data());
    memory.asked.clear(), memory.position.clear();
    for (int64_t i = 0; i < count; ++i) {
      row[i] = memory.state[i] == ChangedId::kRead ? to + i * stride : nullptr;
      if (memory.state[i] != ChangedId::kAskFile) continue;
      memory.asked.push_back(ids[i]), memory.position.push_back(i);
    }
    asked = memory.asked.data();
    asked_count = static_cast<int64_t>(memory.asked.size());
  }
  memory.numbers.resize(static_cast<size_t>(asked_count));
  std::string wrong =
      from.file.find(tile.table, from.salts[tile.table], asked, asked_count, memory.numbers.data());
  if (!wrong.empty()) return wrong;
  memory.wanted.clear();
  for (int64_t k = 0; k < asked_count; ++k) {
    const int64_t i = from.changes == nullptr ? k : memory.position[k];
    const bool found = memory.numbers[k] >= 0;
    row[i] = found ? to + i * stride : nullptr;
    if (found) memory.wanted.push_back({tile.table, memory.numbers[k], ids[i], to + i * stride});
  }
  from.file.take_cached(memory.wanted);
  return {};
}

}  // namespace

void read_rows(const char* op, const FileRows& from, const FeatureArgs& features, CallRows& out) {
  const std::vector<Tile> tiles = make_tiles(features);
  std::vector<int64_t> begins;  // of each tile, in `values`
  int64_t bytes = 0;
  for (const Tile& tile : tiles) {
    begins.push_back(bytes);
    bytes += (tile.end - tile.begin) * place_bytes(from.file.tables()[tile.table]);
  }
  out.ids = features.ids;
  check_available_memory(op, bytes);
  out.values.resize(static_cast<size_t>(bytes));
  out.row.resize(static_cast<size_t>(features.count));
  std::mutex lock;
  std::vector<FileRow> missed;
  std::string wrong;
  parallel_units(
      static_cast<int64_t>(tiles.size()), features.count, [&](int64_t begin, int64_t end) {
        TileMemory memory;
        for (int64_t k = begin; k < end; ++k) {
          const Tile& tile = tiles[k];
          std::string is_wrong =
              find_rows(from, tile, features.ids + tile.begin, out.values.data() + begins[k],
                        out.row.data() + tile.begin, memory);
          if (is_wrong.empty() && memory.wanted.empty()) continue;
          const std::lock_guard<std::mutex> guard(lock);
          if (!is_wrong.empty()) {
            wrong = std::move(is_wrong);
            return;
          }
          missed.insert(missed.end(), memory.wanted.begin(), memory.wanted.end());
        }
      });
  DYNEMB_CHECK(wrong.empty(), "dynemb::", op, ": ", wrong);
  from.file.read(missed);
}

}  // namespace dynemb::cpu
