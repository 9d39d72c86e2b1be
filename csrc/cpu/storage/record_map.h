// Map from rows to records.
#pragma once

#include <cstdint>
#include <vector>

#include "core/index/handle.h"

namespace dynemb::cpu {

// Record numbers by row, with the generation of the row's owner: number : 36 | generation : 28; 0:
// none. In reserved memory: only rows that have had a record take memory.
class RecordMap {
 public:
  explicit RecordMap(int64_t max_rows);
  ~RecordMap();
  RecordMap(const RecordMap&) = delete;
  RecordMap& operator=(const RecordMap&) = delete;

  static constexpr int64_t kNone = -1;

  // The number of the record of the row's owner, or kNone.
  int64_t find(int64_t handle) const;
  // Whether the owner has a record; another thread may write meanwhile.
  bool has(int64_t handle) const;
  // Starts to bring the entry of the owner into the processor's cache.
  void prefetch(int64_t handle) const { __builtin_prefetch(words_ + handle_row(handle)); }
  // The number of the record of the row's last owner.
  int64_t number(int64_t row) const;
  void set(int64_t handle, int64_t number);
  void erase(int64_t handle);
  int64_t max_rows() const { return max_rows_; }

  // All entries up to the last row that has had a record.
  std::vector<int64_t> entries() const;
  void assign(const std::vector<int64_t>& entries);

 private:
  int64_t* words_;
  int64_t max_rows_;
  int64_t rows_ = 0;  // rows below it may have had a record, later ones have not
};

}  // namespace dynemb::cpu
