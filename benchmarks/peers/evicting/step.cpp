// Reference kernel of a training step (row-wise Adagrad) on a full index: rows of new ids begin
// with one value, and are not read before they are written. Every id of a batch occurs once in it,
// so nothing is sorted or summed. Autograd and Python are left out, and rows of victims are
// overwritten before the update.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <vector>

#include "index.h"

namespace evicting {
namespace {

constexpr int64_t kRowsAhead = 24;
constexpr int64_t kLanes = 16;  // of a sum, which the compiler keeps in vectors

// What a thread learns in the forward, and needs for the update.
struct Part {
  std::vector<Missing> missing;
  std::vector<int64_t> rows;
  std::vector<char> is_new;
};

struct Step {
  const Index& index;
  const int64_t* ids;
  int64_t bag_size;
  float* out;         // [bags, kDim]
  const float* grad;  // [bags, kDim]
  float lr;

  float* row_of(int64_t handle) const { return index.weights + (handle >> kRowShift) * kDim; }

  void fetch_row(const Part& part, int64_t i) const {
    if (i >= static_cast<int64_t>(part.rows.size())) return;
    const float* row = row_of(part.rows[i]);
    for (int64_t column = 0; column < kDim; column += kLanes) {
      __builtin_prefetch(row + column, 0, 2);
    }
  }

  void forward(int64_t first_bag, int64_t bags, Part* part) const {
    const int64_t count = bags * bag_size;
    part->rows.resize(count);
    part->is_new.assign(count, 0);
    look_up(index, ids + first_bag * bag_size, count, part->rows.data(), &part->missing);
    for (const Missing& entry : part->missing) part->is_new[entry.position] = 1;
    for (int64_t i = 0; i < kRowsAhead; ++i) {
      if (i < count && part->is_new[i] == 0) fetch_row(*part, i);
    }
    for (int64_t bag = 0; bag < bags; ++bag) {
      float sum[kDim] = {};
      for (int64_t i = bag * bag_size; i < (bag + 1) * bag_size; ++i) {
        const int64_t ahead = i + kRowsAhead;
        if (ahead < count && part->is_new[ahead] == 0) fetch_row(*part, ahead);
        const float* row = row_of(part->rows[i]);
        if (part->is_new[i] != 0) {
          for (int64_t column = 0; column < kDim; ++column) sum[column] += kInitialValue;
        } else {
          for (int64_t column = 0; column < kDim; ++column) sum[column] += row[column];
        }
      }
      std::copy(sum, sum + kDim, out + (first_bag + bag) * kDim);
    }
  }

  void update(int64_t first_bag, int64_t bags, const Part& part) const {
    for (int64_t bag = 0; bag < bags; ++bag) {
      const float* gradient = grad + (first_bag + bag) * kDim;
      float lanes[kLanes] = {};
      for (int64_t column = 0; column < kDim; ++column) {
        lanes[column % kLanes] += gradient[column] * gradient[column];
      }
      float square = 0;
      for (const float lane : lanes) square += lane;
      square /= kDim;
      for (int64_t i = bag * bag_size; i < (bag + 1) * bag_size; ++i) {
        fetch_row(part, i + kRowsAhead);
        const int64_t number = part.rows[i] >> kRowShift;
        float* row = row_of(part.rows[i]);
        const bool is_new = part.is_new[i] != 0;
        float* squares = index.squares + number;
        *squares = (is_new ? 0.0f : *squares) + square;
        const float rate = lr / (std::sqrt(*squares) + 1e-8f);
        if (is_new) {
          for (int64_t column = 0; column < kDim; ++column) {
            row[column] = kInitialValue - rate * gradient[column];
          }
        } else {
          for (int64_t column = 0; column < kDim; ++column) row[column] -= rate * gradient[column];
        }
      }
    }
  }
};

}  // namespace

extern "C" {

// A step for bags of `bag_size` ids each; out, grad: [bags, kDim].
__attribute__((visibility("default"))) void dynemb_peer_evicting_step(
    void* pointer, const int64_t* ids, int64_t bags, int64_t bag_size, float* out,
    const float* grad, float lr, int threads) {
  auto* index = static_cast<Index*>(pointer);
  ++index->step;
  const Step step{*index, ids, bag_size, out, grad, lr};
  run_threads(threads, [&](int thread) {
    static thread_local Part part;
    const int64_t begin = bags * thread / threads;
    const int64_t end = bags * (thread + 1) / threads;
    step.forward(begin, end - begin, &part);
    step.update(begin, end - begin, part);
  });
}

}  // extern "C"

}  // namespace evicting
