// Reference kernel that sums bags of rows found by 64-bit ids: one line of an index and one row for
// each id, both fetched ahead, and nothing else. Scores, growth and generations are left out, all
// ids are present, and threads do not share the work. It shows the cost of the memory traffic of a
// lookup on this machine.

#include <algorithm>
#include <cstdint>

namespace {

constexpr int64_t kWidth = 4;   // ids of a bucket, with rows in the same line
constexpr int64_t kBlock = 64;  // ids with lines on their way together
constexpr int64_t kRowsAhead = 32;

uint64_t mixed(uint64_t x) {  // MurmurHash3's 64-bit finaliser (Appleby, public domain)
  x = (x ^ (x >> 33)) * 0xff51afd7ed558ccdULL;
  x = (x ^ (x >> 33)) * 0xc4ceb9fe1a85ec53ULL;
  return x ^ (x >> 33);
}

int64_t bucket_of(int64_t id, int64_t buckets) {
  const auto hash = static_cast<unsigned __int128>(mixed(static_cast<uint64_t>(id)));
  return static_cast<int64_t>((hash * static_cast<uint64_t>(buckets)) >> 64);
}

// The row of an id, plus 1, if it is in this bucket; else 0. No branch.
int64_t match(const int64_t* line, int64_t id) {
  int64_t found = 0;
  for (int64_t k = 0; k < kWidth; ++k)
    found |= -static_cast<int64_t>(line[k] == id) & line[kWidth + k];
  return found;
}

// Rows of the ids of a block with lines on their way. Those that are not in their first
// bucket are looked at once the others are done.
void find_rows(const int64_t* lines, int64_t buckets, const int64_t* ids, const int64_t* bucket,
               int64_t count, int64_t* row) {
  int64_t later[kBlock];
  int64_t left = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t found = match(lines + bucket[i] * 2 * kWidth, ids[i]);
    row[i] = found - 1;
    later[left] = i;
    left += found == 0;
  }
  for (int64_t k = 0; k < left; ++k) {
    const int64_t i = later[k];
    for (int64_t at = bucket[i]; row[i] < 0;) {
      at = at + 1 == buckets ? 0 : at + 1;
      row[i] = match(lines + at * 2 * kWidth, ids[i]) - 1;
    }
  }
}

template <int64_t kDim>
void pool(const float* rows, const int64_t* row, const int64_t* offsets, int64_t bags, int64_t dim,
          float* out) {
  const int64_t columns = kDim != 0 ? kDim : dim;
  const int64_t end = offsets[bags];
  for (int64_t bag = 0; bag < bags; ++bag) {
    float* sum = out + bag * columns;
    std::fill_n(sum, columns, 0.0f);
    for (int64_t i = offsets[bag]; i < offsets[bag + 1]; ++i) {
      if (i + kRowsAhead < end) __builtin_prefetch(rows + row[i + kRowsAhead] * columns);
      const float* values = rows + row[i] * columns;
      for (int64_t c = 0; c < columns; ++c) sum[c] += values[c];
    }
  }
}

}  // namespace

// Puts ids with rows 0, 1, 2 and so on into lines of zeros, int64 [buckets, 8]. There must
// be room: fewer ids than 4 * buckets.
extern "C" __attribute__((visibility("default"))) void dynemb_peer_ragged_fill(int64_t* lines,
                                                                               int64_t buckets,
                                                                               const int64_t* ids,
                                                                               int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    int64_t bucket = bucket_of(ids[i], buckets);
    while (lines[bucket * 2 * kWidth + 2 * kWidth - 1] != 0) {
      bucket = bucket + 1 == buckets ? 0 : bucket + 1;
    }
    int64_t* line = lines + bucket * 2 * kWidth;
    const int64_t* free = std::find(line + kWidth, line + 2 * kWidth, 0);
    const int64_t slot = free - line - kWidth;
    line[slot] = ids[i];
    line[kWidth + slot] = i + 1;
  }
}

// The forward of one feature: out is float [bags, dim], row is scratch of as many int64 as ids.
// Every id must be there.
extern "C" __attribute__((visibility("default"))) void dynemb_peer_ragged_forward(
    const int64_t* lines, int64_t buckets, const float* rows, int64_t dim, const int64_t* ids,
    const int64_t* offsets, int64_t bags, int64_t* row, float* out) {
  const int64_t count = offsets[bags];
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    int64_t bucket[kBlock];
    const int64_t size = std::min(kBlock, count - begin);
    for (int64_t i = 0; i < size; ++i) {
      bucket[i] = bucket_of(ids[begin + i], buckets);
      __builtin_prefetch(lines + bucket[i] * 2 * kWidth);
    }
    find_rows(lines, buckets, ids + begin, bucket, size, row + begin);
  }
  if (dim == 16) {
    pool<16>(rows, row, offsets, bags, dim, out);
  } else {
    pool<0>(rows, row, offsets, bags, dim, out);
  }
}
