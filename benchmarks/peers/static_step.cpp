// Reference kernel of a training step of a static table: pooled forward, then the update bag by
// bag, without hash, sort or dedupe. An id that occurs twice in a batch moves twice, and threads
// may race on a row, so it cannot replace an optimizer. It shows the cost of the memory traffic of
// a step on this machine.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace {

constexpr int64_t kRowsAhead = 12;

struct Step {
  float* weights;
  float* squares;  // one per row: row-wise Adagrad; null: SGD
  const int64_t* ids;
  int64_t bags;
  int64_t bag_size;
  float* out;
  const float* grad;
  float lr;
};

template <int64_t kDim>
void prefetch_row(const float* row) {
  for (int64_t column = 0; column < kDim; column += 16) {
    __builtin_prefetch(row + column);
  }
}

template <int64_t kDim>
void pool(const Step& step, int64_t first_bag, int64_t last_bag) {
  const int64_t end = last_bag * step.bag_size;
  for (int64_t bag = first_bag; bag < last_bag; ++bag) {
    float sum[kDim] = {};
    for (int64_t i = bag * step.bag_size; i < (bag + 1) * step.bag_size; ++i) {
      if (i + kRowsAhead < end) {
        prefetch_row<kDim>(step.weights + step.ids[i + kRowsAhead] * kDim);
      }
      const float* row = step.weights + step.ids[i] * kDim;
      for (int64_t column = 0; column < kDim; ++column) {
        sum[column] += row[column];
      }
    }
    std::copy(sum, sum + kDim, step.out + bag * kDim);
  }
}

template <int64_t kDim>
void update(const Step& step, int64_t first_bag, int64_t last_bag) {
  const int64_t end = last_bag * step.bag_size;
  for (int64_t bag = first_bag; bag < last_bag; ++bag) {
    const float* grad = step.grad + bag * kDim;
    float lanes[16] = {};
    for (int64_t column = 0; column < kDim; column += 16) {
      for (int64_t lane = 0; lane < 16; ++lane) {
        lanes[lane] += grad[column + lane] * grad[column + lane];
      }
    }
    float square = 0;
    for (float lane : lanes) {
      square += lane;
    }
    square /= kDim;
    for (int64_t i = bag * step.bag_size; i < (bag + 1) * step.bag_size; ++i) {
      if (i + kRowsAhead < end) {
        const int64_t ahead = step.ids[i + kRowsAhead];
        prefetch_row<kDim>(step.weights + ahead * kDim);
        if (step.squares != nullptr) {
          __builtin_prefetch(step.squares + ahead);
        }
      }
      const int64_t id = step.ids[i];
      float rate = step.lr;
      if (step.squares != nullptr) {
        step.squares[id] += square;
        rate /= std::sqrt(step.squares[id]) + 1e-8f;
      }
      float* row = step.weights + id * kDim;
      for (int64_t column = 0; column < kDim; ++column) {
        row[column] -= rate * grad[column];
      }
    }
  }
}

template <int64_t kDim>
void run(const Step& step, int threads) {
  const auto phase = [&](void (*work)(const Step&, int64_t, int64_t)) {
    std::vector<std::thread> others;
    for (int thread = 1; thread < threads; ++thread) {
      others.emplace_back(work, std::cref(step), step.bags * thread / threads,
                          step.bags * (thread + 1) / threads);
    }
    work(step, 0, step.bags / threads);
    for (auto& other : others) {
      other.join();
    }
  };
  phase(pool<kDim>);
  phase(update<kDim>);
}

}  // namespace

extern "C" {

// Returns 0 for a dim that was not compiled.
__attribute__((visibility("default"))) int dynemb_peer_static_step(float* weights, float* squares,
                                                                   int64_t dim, const int64_t* ids,
                                                                   int64_t bags, int64_t bag_size,
                                                                   float* out, const float* grad,
                                                                   float lr, int threads) {
  const Step step{weights, squares, ids, bags, bag_size, out, grad, lr};
  switch (dim) {
    case 16:
      run<16>(step, threads);
      return 1;
    case 64:
      run<64>(step, threads);
      return 1;
    case 128:
      run<128>(step, threads);
      return 1;
    default:
      return 0;
  }
}

}  // extern "C"
