// Parts of reservations that grow together: memory is mapped for the same number of rows in each of
// them.
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
  bool in_hbm = false;  // whatever the budget of the reservation is
};

// Parts that grow together: the buckets of a table with their scores; the rows of a slab with
// generations, state and entries of the free list; or the pending gradients of a slab.
struct Growing {
  std::vector<RowMemory> memory;
  int64_t capacity = 0;
  int64_t mapped = 0;
  int64_t kept = 0;           // never given back: requested explicitly, or in use when the group
                              // was bound
  int64_t needed = 0;         // largest need of a call in this period of MappedTables
  int64_t needed_before = 0;  // in the preceding period

  // Gives back memory beyond so many rows, except in the entry of `memory` at `spared`. Kernels
  // must not get that memory any more. After an error some of it may still be mapped, but does not
  // count.
  void release(const char* op, int64_t rows, size_t spared);
  void release(const char* op, int64_t rows) { release(op, rows, memory.size()); }

  void need(int64_t rows);
  void keep() { kept = needed = needed_before = mapped; }
  // Number of rows worth keeping: those needed within a period; `held` are in use now.
  int64_t useful(int64_t held) const;
  void begin_period();

  // Whether so many rows, or all there may be, are mapped.
  bool is_mapped(int64_t rows) const;
  int64_t row_bytes() const;
  int64_t missing_bytes(int64_t rows) const;  // not mapped yet
};

// Memory that a call maps in several places. At the end of this object it is given back unless
// everything was mapped: a refusal leaves as much memory free as before.
class MappingAttempt {
 public:
  // `stream`: for clearing memory. Requires that calls forbidden during capture are allowed.
  explicit MappingAttempt(cudaStream_t stream) : stream_(stream) {}
  ~MappingAttempt();
  MappingAttempt(const MappingAttempt&) = delete;

  // Maps memory for so many rows, and for some more if there is enough.
  Mapped map(const char* op, Growing* growing, int64_t rows);
  // Maps memory for the rows in one part of what grows together.
  Mapped map_part(const char* op, const RowMemory& part, int64_t begin, int64_t end);
  void keep();

 private:
  struct Pieces {
    std::shared_ptr<Reservation> reservation;
    std::vector<int64_t> offsets;
  };
  struct Grown {
    Growing* growing;
    int64_t before;
  };
  void give_back(size_t first);

  cudaStream_t stream_;
  std::vector<Pieces> pieces_;
  std::vector<Grown> grown_;
};

}  // namespace dynemb::cuda
