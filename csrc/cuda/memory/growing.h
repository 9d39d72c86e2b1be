// Parts of reservations that grow together: memory is mapped for so many rows in each of them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cuda/memory/reservation.h"

namespace dynemb::cuda {

// Equal parts of a reservation, one for each row (or bucket).
struct RowMemory {
  std::shared_ptr<Reservation> reservation;
  int64_t begin;  // bytes
  int64_t row_bytes;
};

// What grows together: the buckets of a table with their scores, the rows of a slab with
// generations, state and entries of the free list, or the pending gradients of a slab.
struct Growing {
  std::vector<RowMemory> memory;
  int64_t capacity = 0;
  int64_t mapped = 0;
  int64_t kept = 0;           // not given back: asked for by name, or held when the group was bound
  int64_t needed = 0;         // the most that a call needed in this period of MappedTables
  int64_t needed_before = 0;  // and in the one before

  // Gives memory beyond so many rows back, but for the entry of `memory` at `spared`. No kernel may
  // be told of that memory any more. After an error some of it may be mapped, but does not count.
  void release(const char* op, int64_t rows, size_t spared);
  void release(const char* op, int64_t rows) { release(op, rows, memory.size()); }

  void need(int64_t rows);
  void keep() { kept = needed = needed_before = mapped; }
  // Rows beyond these have been of no use for a period; `held` are in use now.
  int64_t useful(int64_t held) const;
  void begin_period();

  // Whether so many rows, or all there may be, are mapped.
  bool is_mapped(int64_t rows) const;
  int64_t row_bytes() const;
  int64_t missing_bytes(int64_t rows) const;  // that are not mapped yet
};

// Memory that a call maps in several places. What it has got is given back at the end of this
// object unless all of it was to be had: a refusal leaves as much memory free as there was.
class MappingAttempt {
 public:
  // `stream`: on which memory is cleared. Calls that a capture forbids must be allowed.
  explicit MappingAttempt(cudaStream_t stream) : stream_(stream) {}
  ~MappingAttempt();
  MappingAttempt(const MappingAttempt&) = delete;

  // Maps memory for so many rows, and for some more where there is enough. false: there is not.
  bool map(const char* op, Growing* growing, int64_t rows);
  // Maps memory for the rows in one part of what grows together.
  bool map_part(const char* op, const RowMemory& part, int64_t begin, int64_t end);
  void keep();

 private:
  struct Pieces {
    std::shared_ptr<Reservation> reservation;
    std::vector<int64_t> offsets;
  };
  struct Mapped {
    Growing* growing;
    int64_t before;
  };
  void give_back(size_t first);

  cudaStream_t stream_;
  std::vector<Pieces> pieces_;
  std::vector<Mapped> mapped_;
};

}  // namespace dynemb::cuda
