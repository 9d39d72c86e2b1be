// Memory of the gradients that are pending between backward and optimizer step, slab by slab. The
// host knows only upper bounds of their number.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda/memory/growing.h"
#include "cuda/memory/mapped_tables.h"

namespace dynemb::cuda {

class PendingGradients {
 public:
  // `memory` by slab; empty: the backward updates the rows, and nothing is ever pending.
  PendingGradients(SharedWords shared, std::vector<Growing> memory);

  // Entries, and lookups that appended them since the last merge, by slab.
  void bind(const Call& call, const std::vector<int64_t>& counts);
  // See table_memory.h.
  std::vector<int64_t> prepare_append(const Call& call, const MappedTables& tables,
                                      const std::vector<bool>& touched, int64_t ids);
  std::vector<int64_t> prepare_merge(const Call& call, const MappedTables& tables);
  void note_applied() { applied_ = true; }
  void end_step();
  void end_capture();
  // Gives back memory beyond the entries.
  void release(const Call& call);

 private:
  struct Slab {
    Growing memory;
    int64_t entries = 0;
    int64_t lookups = 0;       // that appended entries since the last merge
    int64_t captured_now = 0;  // ids of the running capture
    int64_t captured = 0;      // ids that a replay of a captured step may append

    void count_replays();
    void note_merged(int64_t rows);
  };

  void map(const Call& call, const std::vector<int64_t>& entries);

  SharedWords shared_;
  std::vector<Slab> slabs_;
  bool applied_ = false;  // since the last lookup appended gradients
};

}  // namespace dynemb::cuda
