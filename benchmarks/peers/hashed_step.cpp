// Reference kernel of a training step with the least work of any table that hashes and gives each
// row one update. An id costs one line of an index, its row, one place in a radix sort by rows, and
// the row once more. It leaves out scores, generations, growth, missing ids, autograd and Python;
// index and rows lie in huge pages. It shows how fast a step could be on this machine. Rows may be
// of 16 bits, rounded to nearest, and a split step writes the sums of gradients to memory before it
// applies them.

#include <sys/mman.h>
#if defined(__F16C__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

namespace {

constexpr int64_t kWidth = 4;   // ids of a bucket, with rows in the same line
constexpr int64_t kBlock = 64;  // ids with lines on their way together
constexpr int64_t kRowsAhead = 24;
constexpr int64_t kGradientsAhead = 12;
constexpr int kDigitBits = 11;
constexpr int64_t kDigits = 1 << kDigitBits;
constexpr int kPasses = 2;  // of the sort: 22 bits of a row's number

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};
template <class T>
using Memory = std::unique_ptr<T[], Free>;

template <class T>
Memory<T> huge_pages(int64_t count) {
  constexpr size_t kHugePage = size_t{1} << 21;
  const size_t bytes = (static_cast<size_t>(count) * sizeof(T) + kHugePage - 1) & -kHugePage;
  void* memory = std::aligned_alloc(kHugePage, bytes);
  madvise(memory, bytes, MADV_HUGEPAGE);
  std::memset(memory, 0, bytes);
  return Memory<T>(static_cast<T*>(memory));
}

// Threads wait for each other here; there are as many as cores, so they spin.
class Barrier {
 public:
  explicit Barrier(int threads) : threads_(threads) {}
  void wait() {
    const int64_t round = round_.load();
    if (arrived_.fetch_add(1) + 1 == threads_) {
      arrived_.store(0);
      round_.store(round + 1);
    } else {
      while (round_.load() == round) std::this_thread::yield();
    }
  }

 private:
  const int threads_;
  std::atomic<int> arrived_{0};
  std::atomic<int64_t> round_{0};
};

uint64_t mixed(uint64_t x) {  // MurmurHash3's 64-bit finaliser (Appleby, public domain)
  x = (x ^ (x >> 33)) * 0xff51afd7ed558ccdULL;
  x = (x ^ (x >> 33)) * 0xc4ceb9fe1a85ec53ULL;
  return x ^ (x >> 33);
}

void prefetch(const void* line) { __builtin_prefetch(line, 0, 2); }

template <int64_t kDim, class Value>
void prefetch_row(const Value* row) {
  constexpr int64_t kValues = 64 / sizeof(Value);
  for (int64_t column = 0; column < kDim; column += kValues) prefetch(row + column);
}

// The values of rows, sixteen of which are converted at a time.
constexpr int64_t kValues = 16;
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

void load(const float* from, float* to) { std::copy(from, from + kValues, to); }
void load(const BFloat16* from, float* to) {
  uint32_t bits[kValues];
  for (int64_t k = 0; k < kValues; ++k) bits[k] = uint32_t{from[k].bits} << 16;
  std::memcpy(to, bits, sizeof bits);
}
void store(const float* from, float* to) { std::copy(from, from + kValues, to); }
void store(const float* from, BFloat16* to) {
  uint32_t bits[kValues];
  std::memcpy(bits, from, sizeof bits);
  for (int64_t k = 0; k < kValues; ++k) {
    to[k].bits = static_cast<uint16_t>((bits[k] + 0x7fff + (bits[k] >> 16 & 1)) >> 16);
  }
}
#if defined(__F16C__)
void load(const Float16* from, float* to) {
  for (int64_t k = 0; k < kValues; k += 8) {
    __m128i halves;
    std::memcpy(&halves, from + k, sizeof halves);
    _mm256_storeu_ps(to + k, _mm256_cvtph_ps(halves));
  }
}
void store(const float* from, Float16* to) {
  for (int64_t k = 0; k < kValues; k += 8) {
    const __m256 values = _mm256_loadu_ps(from + k);
    const __m128i halves = _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT);
    std::memcpy(to + k, &halves, sizeof halves);
  }
}
#endif

enum Storage : int { kFloat32, kBFloat16, kFloat16 };

struct Table {
  int64_t rows;
  int64_t dim;
  int storage;
  int64_t buckets;
  Memory<int64_t> lines;  // [buckets, 2 * kWidth]: ids, then their rows + 1
  Memory<char> weights;   // [rows, dim] of the storage
  Memory<float> squares;  // one per row: row-wise Adagrad; null: SGD
  std::vector<uint64_t> keys, other;
  Memory<float> sums;  // [ids of a call, dim]: of a split step
  std::vector<int64_t> sum_rows;
  int64_t sums_room = 0;

  template <class Value>
  Value* values() const {
    return reinterpret_cast<Value*>(weights.get());
  }

  int64_t bucket_of(int64_t id) const {
    const auto hash = static_cast<unsigned __int128>(mixed(static_cast<uint64_t>(id)));
    return static_cast<int64_t>((hash * static_cast<uint64_t>(buckets)) >> 64);
  }
  // The row of an id, plus 1, if it is in this bucket; else 0. No branch.
  int64_t match(int64_t bucket, int64_t id) const {
    const int64_t* line = lines.get() + bucket * 2 * kWidth;
    int64_t found = 0;
    for (int64_t k = 0; k < kWidth; ++k)
      found |= -static_cast<int64_t>(line[k] == id) & line[kWidth + k];
    return found;
  }
  int64_t find(int64_t bucket, int64_t id) const {
    int64_t found = match(bucket, id);
    while (found == 0) {
      bucket = bucket + 1 == buckets ? 0 : bucket + 1;
      found = match(bucket, id);
    }
    return found - 1;
  }
  void insert(int64_t id, int64_t row) {
    for (int64_t bucket = bucket_of(id);; bucket = bucket + 1 == buckets ? 0 : bucket + 1) {
      int64_t* line = lines.get() + bucket * 2 * kWidth;
      for (int64_t k = 0; k < kWidth; ++k) {
        if (line[kWidth + k] != 0) continue;
        line[k] = id;
        line[kWidth + k] = row + 1;
        return;
      }
    }
  }
};

struct Step {
  Table& table;
  const int64_t* ids;
  int64_t bags;
  int64_t bag_size;
  float* out;
  const float* grad;
  float lr;
  int threads;
  bool splits;
  int position_bits;
  Barrier barrier;
  std::vector<int64_t> counts;  // [passes, threads, digits]

  int64_t* counters(int pass, int thread) {
    return counts.data() + (pass * threads + thread) * kDigits;
  }
  int64_t digit(uint64_t key, int pass) const {
    return static_cast<int64_t>(key >> (position_bits + pass * kDigitBits)) & (kDigits - 1);
  }
};

// Finds the ids of a thread's bags and sums their rows: the line of an index on its way a block
// ahead, the row another block.
template <class Value, int64_t kDim>
void find_and_pool(Step& step, int thread) {
  const Table& table = step.table;
  const int64_t first_bag = step.bags * thread / step.threads;
  const int64_t begin = first_bag * step.bag_size;
  const int64_t end = step.bags * (thread + 1) / step.threads * step.bag_size;
  int64_t bucket[kBlock], row[2][kBlock];
  int64_t* counter = step.counters(0, thread);
  const auto hash = [&](int64_t first) {
    for (int64_t i = first; i < std::min(first + kBlock, end); ++i) {
      bucket[i - first] = table.bucket_of(step.ids[i]);
      prefetch(table.lines.get() + bucket[i - first] * 2 * kWidth);
    }
  };
  const auto find = [&](int64_t first, int64_t* found) {
    for (int64_t i = first; i < std::min(first + kBlock, end); ++i) {
      const int64_t at = table.find(bucket[i - first], step.ids[i]);
      found[i - first] = at;
      const uint64_t key =
          static_cast<uint64_t>(at) << step.position_bits | static_cast<uint64_t>(i);
      step.table.keys[i] = key;
      ++counter[step.digit(key, 0)];
      prefetch_row<kDim>(table.values<Value>() + at * kDim);
    }
  };
  hash(begin);
  find(begin, row[0]);
  hash(begin + kBlock);
  float* out = step.out + first_bag * kDim;
  int64_t left = step.bag_size;
  float sum[kDim] = {};
  for (int64_t first = begin, turn = 0; first < end; first += kBlock, turn ^= 1) {
    find(first + kBlock, row[turn ^ 1]);
    hash(first + 2 * kBlock);
    for (int64_t i = first; i < std::min(first + kBlock, end); ++i) {
      const Value* from = table.values<Value>() + row[turn][i - first] * kDim;
      for (int64_t column = 0; column < kDim; column += kValues) {
        float terms[kValues];
        load(from + column, terms);
        for (int64_t k = 0; k < kValues; ++k) sum[column + k] += terms[k];
      }
      if (--left > 0) continue;
      std::copy(sum, sum + kDim, out);
      std::fill(sum, sum + kDim, 0.0f);
      out += kDim;
      left = step.bag_size;
    }
  }
}

void sort_pass(Step& step, int thread, int pass, const uint64_t* from, uint64_t* to) {
  const auto count = static_cast<int64_t>(step.table.keys.size());
  const int64_t begin = count * thread / step.threads;
  const int64_t end = count * (thread + 1) / step.threads;
  if (pass > 0) {  // the counts of the first pass were made with its keys
    int64_t* counter = step.counters(pass, thread);
    for (int64_t i = begin; i < end; ++i) ++counter[step.digit(from[i], pass)];
    step.barrier.wait();
  }
  std::vector<int64_t> next(kDigits);
  int64_t sum = 0;
  for (int64_t d = 0; d < kDigits; ++d) {
    for (int t = 0; t < step.threads; ++t) {
      if (t == thread) next[d] = sum;
      sum += step.counters(pass, t)[d];
    }
  }
  for (int64_t i = begin; i < end; ++i) to[next[step.digit(from[i], pass)]++] = from[i];
  step.barrier.wait();
}

// Applies a row's gradient to it.
template <class Value, int64_t kDim>
void update_row(const Step& step, int64_t row, const float* gradient) {
  const Table& table = step.table;
  float rate = step.lr;
  if (table.squares != nullptr) {
    float lanes[16] = {};
    for (int64_t column = 0; column < kDim; column += 16) {
      for (int64_t lane = 0; lane < 16; ++lane) {
        lanes[lane] += gradient[column + lane] * gradient[column + lane];
      }
    }
    float square = 0;
    for (float lane : lanes) square += lane;
    table.squares[row] += square / kDim;
    rate /= std::sqrt(table.squares[row]) + 1e-8f;
  }
  Value* weight = table.values<Value>() + row * kDim;
  for (int64_t column = 0; column < kDim; column += kValues) {
    float values[kValues];
    load(weight + column, values);
    for (int64_t k = 0; k < kValues; ++k) values[k] -= rate * gradient[column + k];
    store(values, weight + column);
  }
}

template <class Value, int64_t kDim>
void prefetch_update(const Table& table, int64_t row) {
  prefetch_row<kDim>(table.values<Value>() + row * kDim);
  if (table.squares != nullptr) prefetch(table.squares.get() + row);
}

// Sums the gradients of each row and applies or, in a split step, keeps them: a thread's rows are
// those that begin in its part of the sorted occurrences. Returns which sums it kept.
template <class Value, int64_t kDim, bool kSplit>
std::pair<int64_t, int64_t> sum_gradients(Step& step, int thread) {
  Table& table = step.table;
  const auto count = static_cast<int64_t>(table.keys.size());
  const uint64_t* key = table.keys.data();
  const uint64_t mask = (uint64_t{1} << step.position_bits) - 1;
  const auto row_of = [&](int64_t i) { return static_cast<int64_t>(key[i] >> step.position_bits); };
  const auto grad_of = [&](int64_t i) {
    return step.grad + static_cast<int64_t>(key[i] & mask) / step.bag_size * kDim;
  };
  const auto start = [&](int64_t i) {
    while (i > 0 && i < count && row_of(i) == row_of(i - 1)) ++i;
    return i;
  };
  const int64_t begin = start(count * thread / step.threads);
  const int64_t end = start(count * (thread + 1) / step.threads);
  int64_t kept = begin;
  for (int64_t i = begin; i < end;) {
    const int64_t row = row_of(i);
    float sum[kDim];
    const float* gradient = grad_of(i);
    for (int64_t occurrence = i;;) {
      if (occurrence + kRowsAhead < end) {
        if (!kSplit) prefetch_update<Value, kDim>(table, row_of(occurrence + kRowsAhead));
        const float* coming = grad_of(occurrence + kGradientsAhead);
        for (int64_t column = 0; column < kDim; column += 16) __builtin_prefetch(coming + column);
      }
      if (++occurrence == end || row_of(occurrence) != row) {
        i = occurrence;
        break;
      }
      if (gradient != sum) std::copy(gradient, gradient + kDim, sum);
      gradient = sum;
      const float* next = grad_of(occurrence);
      for (int64_t column = 0; column < kDim; ++column) sum[column] += next[column];
    }
    if constexpr (kSplit) {
      table.sum_rows[kept] = row;
      std::copy(gradient, gradient + kDim, table.sums.get() + kept++ * kDim);
    } else {
      update_row<Value, kDim>(step, row, gradient);
    }
  }
  return {begin, kept};
}

// The second pass of a split step, over what a thread has kept.
template <class Value, int64_t kDim>
void apply_sums(const Step& step, int64_t begin, int64_t end) {
  const Table& table = step.table;
  for (int64_t i = begin; i < end; ++i) {
    if (i + kRowsAhead < end) {
      prefetch_update<Value, kDim>(table, table.sum_rows[i + kRowsAhead]);
      prefetch_row<kDim>(table.sums.get() + (i + kRowsAhead) * kDim);
    }
    update_row<Value, kDim>(step, table.sum_rows[i], table.sums.get() + i * kDim);
  }
}

template <class Value, int64_t kDim>
void run_thread(Step& step, int thread) {
  find_and_pool<Value, kDim>(step, thread);
  step.barrier.wait();
  uint64_t* from = step.table.keys.data();
  uint64_t* to = step.table.other.data();
  for (int pass = 0; pass < kPasses; ++pass, std::swap(from, to)) {
    sort_pass(step, thread, pass, from, to);
  }
  if (!step.splits) {
    sum_gradients<Value, kDim, false>(step, thread);
    return;
  }
  const auto [first, last] = sum_gradients<Value, kDim, true>(step, thread);
  step.barrier.wait();
  apply_sums<Value, kDim>(step, first, last);
}

template <class Value, int64_t kDim>
void run(Step& step) {
  std::vector<std::thread> others;
  for (int thread = 1; thread < step.threads; ++thread) {
    others.emplace_back([&step, thread] { run_thread<Value, kDim>(step, thread); });
  }
  run_thread<Value, kDim>(step, 0);
  for (auto& other : others) other.join();
}

// Returns whether the dim was compiled.
template <class Value>
bool run_dim(Step& step) {
  switch (step.table.dim) {
    case 16:
      run<Value, 16>(step);
      return true;
    case 64:
      run<Value, 64>(step);
      return true;
    case 128:
      run<Value, 128>(step);
      return true;
    default:
      return false;
  }
}

}  // namespace

#define PEER_EXPORT __attribute__((visibility("default")))

extern "C" {

// A table of these ids with random rows of a storage: 0 float32, 1 bfloat16, 2 float16.
PEER_EXPORT Table* dynemb_peer_hashed_create(const int64_t* ids, int64_t rows, int64_t dim,
                                             int with_squares, int storage) {
  auto* table = new Table{};
  table->rows = rows;
  table->dim = dim;
  table->storage = storage;
  table->buckets = rows * 10 / 7 / kWidth + 1;
  table->lines = huge_pages<int64_t>(table->buckets * 2 * kWidth);
  table->weights = huge_pages<char>(rows * dim * (storage == kFloat32 ? 4 : 2));
  if (with_squares != 0) table->squares = huge_pages<float>(rows);
  for (int64_t row = 0; row < rows; ++row) table->insert(ids[row], row);
  for (int64_t i = 0; i < rows * dim; ++i) {
    // a few bits, which every storage holds exactly
    const auto value = static_cast<float>(mixed(static_cast<uint64_t>(i)) >> 57) / 1024;
    if (storage == kFloat32) {
      table->values<float>()[i] = value;
    } else if (storage == kBFloat16) {
      uint32_t bits;
      std::memcpy(&bits, &value, sizeof bits);
      table->values<BFloat16>()[i].bits = static_cast<uint16_t>(bits >> 16);
#if defined(__F16C__)
    } else {
      table->values<Float16>()[i].bits = _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT);
#endif
    }
  }
  return table;
}

PEER_EXPORT void dynemb_peer_hashed_destroy(Table* table) { delete table; }

// [rows, dim], in the order of the ids.
PEER_EXPORT const char* dynemb_peer_hashed_weights(const Table* table) {
  return table->weights.get();
}

// Ids must be in the table. Returns 0 for a dim or storage that was not compiled.
PEER_EXPORT int dynemb_peer_hashed_step(Table* table, const int64_t* ids, int64_t bags,
                                        int64_t bag_size, float* out, const float* grad, float lr,
                                        int threads, int splits) {
  const int64_t count = bags * bag_size;
  int position_bits = 1;
  while (int64_t{1} << position_bits < count) ++position_bits;
  table->keys.resize(count);
  table->other.resize(count);
  if (splits != 0 && table->sums_room < count) {
    table->sums = huge_pages<float>(count * table->dim);
    table->sum_rows.resize(count);
    table->sums_room = count;
  }
  Step step{*table,  ids,         bags,          bag_size,         out, grad, lr,
            threads, splits != 0, position_bits, Barrier(threads), {}};
  step.counts.assign(kPasses * threads * kDigits, 0);
  switch (table->storage) {
    case kFloat32:
      return run_dim<float>(step);
    case kBFloat16:
      return run_dim<BFloat16>(step);
#if defined(__F16C__)
    case kFloat16:
      return run_dim<Float16>(step);
#endif
    default:
      return 0;
  }
}

}  // extern "C"
