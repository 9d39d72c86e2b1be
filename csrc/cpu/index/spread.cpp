#include "cpu/index/spread.h"

#include <algorithm>
#include <cstring>

#include "core/policy/decisions.h"
#include "cpu/index/probe_block.h"
#include "cpu/runtime/simd.h"

#if DYNEMB_X86
#include <immintrin.h>
#endif

namespace dynemb::cpu {
namespace {

constexpr int64_t kSpreadBuckets = 32;  // read together
// New lines are assembled in the first-level cache and written as a whole. So they are not read
// first, and old lines need not be cleared. A ring, because the first line for a block of old
// buckets is also that of the next block.
constexpr int64_t kWindowLines = 128;
constexpr int64_t kMostLinesABucket = 2;
static_assert(kSpreadBuckets * kMostLinesABucket + 2 <= kWindowLines, "a block fits the window");
constexpr int64_t kNowhere = kWindowLines;  // a line that is always full

// New lines of at least this many bytes leave the caches before they are read, so they are written
// past the caches.
constexpr int64_t kStreamedBytes = int64_t{1} << 24;

// Other threads see what was streamed after end_stream().
DYNEMB_INLINE void write_words(const int64_t* from, int64_t words, bool streams, int64_t* to) {
#if DYNEMB_X86
  if (streams) {
    for (int64_t w = 0; w < words; w += 2) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + w),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + w)));
    }
    return;
  }
#endif
  std::memcpy(to, from, static_cast<size_t>(words) * sizeof(int64_t));
}
void end_stream() {
#if DYNEMB_X86
  _mm_sfence();
#endif
}
bool can_stream(const void* to) {
  return DYNEMB_X86 != 0 && reinterpret_cast<uintptr_t>(to) % 16 == 0;
}

DYNEMB_INLINE void copy_scores(const int64_t* from, int64_t words, int64_t* to) {
  for (int64_t w = 0; w < words; ++w) to[w * kBucketWidth] = from[w * kBucketWidth];
}

DYNEMB_INLINE void leave_over(const TableView& table, int64_t bucket, int64_t slot,
                              Leftovers* rest) {
  int64_t* record = rest->add();
  const int64_t* line = table.line(bucket);
  record[0] = line[slot];
  record[1] = line[kBucketWidth + slot];
  for (int64_t w = 0; w < table.score_words; ++w) {
    Leftovers::scores(record)[w] = table.score(bucket, slot)[w * kBucketWidth];
  }
}

// Growth by at most kMostLinesABucket.
DYNEMB_INLINE void spread_through_window_body(const SpreadJob& job) {
  const TableView table = job.table;
  const int64_t words = table.score_words;
  const int64_t score_line = words * kBucketWidth;
  const auto old_count = static_cast<uint64_t>(table.bucket_count);
  const auto new_count = static_cast<uint64_t>(job.bucket_count);
  const auto first_target = [&](int64_t bucket) {
    return static_cast<int64_t>(static_cast<uint64_t>(bucket) * new_count / old_count);
  };
  const bool streams = job.bucket_count * kBucketWords * 8 >= kStreamedBytes &&
                       can_stream(table.lines) && can_stream(table.scores);
  alignas(64) int64_t lines[kWindowLines * kBucketWords];
  alignas(64) int64_t scores[kWindowLines * kBucketWidth * kMaxScoreWords];
  uint8_t filled[kWindowLines + 1];
  std::memset(lines, 0, sizeof lines);
  std::memset(scores, 0, static_cast<size_t>(kWindowLines * score_line) * sizeof(int64_t));
  std::memset(filled, 0, sizeof filled);
  filled[kNowhere] = kBucketWidth;
  int64_t written = first_target(job.end);  // new lines from here on
  for (int64_t last = job.end; last > job.begin;) {
    const int64_t first = std::max(last - kSpreadBuckets, job.begin);
    uint8_t source[kSpreadBuckets * kBucketWidth];
    uint8_t target[kSpreadBuckets * kBucketWidth];
    int64_t count = 0;
    for (int64_t bucket = last - 1; bucket >= first; --bucket) {
      const int64_t* line = table.line(bucket);
#pragma GCC unroll 8
      for (int j = 0; j < kBucketWidth; j += 4) {
        const Words4 keys = load_words(line + j);
        const Words4 stored = load_words(line + kBucketWidth + j);
        const UnsignedWords4 hash =
            fmix64_words(reinterpret_cast<UnsignedWords4>(keys) ^ table.salt);
        const Words4 own = reinterpret_cast<Words4>(buckets_of_words(hash, old_count)) == bucket;
        const Words4 to = reinterpret_cast<Words4>(buckets_of_words(hash, new_count));
        const Words4 window = (own & (to & (kWindowLines - 1))) | (~own & kNowhere);
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) {
          source[count] = static_cast<uint8_t>((bucket - first) * kBucketWidth + j + k);
          target[count] = static_cast<uint8_t>(window[k]);
          count += stored[k] != 0;
        }
      }
    }
    for (int64_t i = 0; i < count; ++i) {
      const int64_t bucket = first + source[i] / kBucketWidth;
      const int64_t slot = source[i] % kBucketWidth;
      const int64_t free = filled[target[i]];
      if (free == kBucketWidth) {
        leave_over(table, bucket, slot, job.rest);
        continue;
      }
      filled[target[i]] = static_cast<uint8_t>(free + 1);
      const int64_t* line = table.line(bucket);
      int64_t* to = lines + target[i] * kBucketWords;
      to[free] = line[slot];
      to[kBucketWidth + free] = line[kBucketWidth + slot];
      if (words > 0) {
        copy_scores(table.score(bucket, slot), words, scores + target[i] * score_line + free);
      }
    }
    // the first target may also be one of the following buckets
    const int64_t complete = first_target(first) + (first == job.begin ? 0 : 1);
    for (int64_t line = complete; line < written; ++line) {
      const int64_t at = line & (kWindowLines - 1);
      write_words(lines + at * kBucketWords, kBucketWords, streams, table.line(line));
      std::memset(lines + at * kBucketWords, 0, kBucketWords * sizeof(int64_t));
      filled[at] = 0;
      if (words == 0) continue;
      write_words(scores + at * score_line, score_line, streams, table.score(line, 0));
      std::memset(scores + at * score_line, 0, static_cast<size_t>(score_line) * sizeof(int64_t));
    }
    written = complete;
    last = first;
  }
  if (streams) end_stream();
}
DYNEMB_SIMD_VARIANTS(spread_through_window, (const SpreadJob& job), (job))

// The first free slot, or kBucketWidth: a growth fills a bucket from its first slot on.
DYNEMB_INLINE int first_free(const int64_t* line) {
  int free = 0;
  for (int j = 0; j < kBucketWidth; ++j) free += line[kBucketWidth + j] != 0;
  return free;
}

// Growth by any factor: touches only lines that get an entry.
void scatter_buckets(const SpreadJob& job) {
  constexpr int64_t kScatterBuckets = 16;  // taken out of the index together
  const TableView& table = job.table;
  const int64_t words = table.score_words;
  const int64_t score_line = words * kBucketWidth;
  int64_t lines[kScatterBuckets * kBucketWords];
  int64_t scores[kScatterBuckets * kBucketWidth * kMaxScoreWords];
  for (int64_t last = job.end; last > job.begin;) {
    const int64_t first = std::max(last - kScatterBuckets, job.begin);
    const auto buckets = static_cast<size_t>(last - first);
    std::memcpy(lines, table.line(first), buckets * kBucketWords * sizeof(int64_t));
    std::memset(table.line(first), 0, buckets * kBucketWords * sizeof(int64_t));
    if (words > 0) {
      const size_t bytes = buckets * static_cast<size_t>(score_line) * sizeof(int64_t);
      std::memcpy(scores, table.score(first, 0), bytes);
      std::memset(table.score(first, 0), 0, bytes);
    }
    TableView taken = table;  // its bucket 0 is `first`
    taken.lines = lines;
    taken.scores = scores;
    for (int64_t bucket = last - first - 1; bucket >= 0; --bucket) {
      const int64_t* line = taken.line(bucket);
      for (int64_t slot = 0; slot < kBucketWidth; ++slot) {
        if (line[kBucketWidth + slot] == 0) continue;
        const uint64_t hash = first_hash(line[slot], table.salt);
        const int64_t target = bucket_of(hash, job.bucket_count);
        int64_t* to = table.line(target);
        const int free = first_free(to);
        if (bucket_of(hash, table.bucket_count) != first + bucket || free == kBucketWidth) {
          leave_over(taken, bucket, slot, job.rest);
          continue;
        }
        to[free] = line[slot];
        to[kBucketWidth + free] = line[kBucketWidth + slot];
        if (words > 0) copy_scores(taken.score(bucket, slot), words, table.score(target, free));
      }
    }
    last = first;
  }
}

struct TidyJob {
  const TableView& table;
  int64_t begin;  // buckets
  int64_t end;
  Leftovers* rest;
};

// Entries in their first bucket stay there, moved to its first slots. A bucket with only such
// entries and without a tombstone is only read, but for the step words of free slots.
DYNEMB_INLINE void tidy_in_place_body(const TidyJob& job) {
  const TableView table = job.table;
  const auto bucket_count = static_cast<uint64_t>(table.bucket_count);
  const int64_t words = table.score_words;
  for (int64_t bucket = job.end - 1; bucket >= job.begin; --bucket) {
    int64_t* line = table.line(bucket);
    uint32_t used = 0;      // a bit for each slot
    uint32_t occupied = 0;  // not a tombstone
    uint32_t kept = 0;
#pragma GCC unroll 8
    for (int j = 0; j < kBucketWidth; j += 4) {
      const Words4 keys = load_words(line + j);
      const Words4 stored = load_words(line + kBucketWidth + j);
      const UnsignedWords4 hash = fmix64_words(reinterpret_cast<UnsignedWords4>(keys) ^ table.salt);
      const Words4 own = reinterpret_cast<Words4>(buckets_of_words(hash, bucket_count)) == bucket;
      const Words4 bit{1, 2, 4, 8};
      used |= static_cast<uint32_t>(or_words(((keys | stored) != 0) & bit)) << j;
      occupied |= static_cast<uint32_t>(or_words((stored != 0) & bit)) << j;
      kept |= static_cast<uint32_t>(or_words((stored != 0) & own & bit)) << j;
    }
    // all used slots are kept and come first
    if (used == kept && (kept & (kept + 1)) == 0) {
      constexpr int kLast = kBucketWidth - 1;
      if (words == 0 || kept >> kLast != 0 || *table.score(bucket, kLast) == kFreeStep) continue;
      for (int free = __builtin_popcount(kept); free < kBucketWidth; ++free) {
        clear_scores(table, bucket, free);
      }
      continue;
    }
    for (uint32_t left = occupied & ~kept; left != 0; left &= left - 1) {
      leave_over(table, bucket, __builtin_ctz(left), job.rest);
    }
    int free = 0;
    for (; kept != 0; kept &= kept - 1, ++free) {
      const int slot = __builtin_ctz(kept);
      line[free] = line[slot];
      line[kBucketWidth + free] = line[kBucketWidth + slot];
      for (int64_t w = 0; w < words; ++w) {
        table.score(bucket, free)[w * kBucketWidth] = table.score(bucket, slot)[w * kBucketWidth];
      }
    }
    for (; free < kBucketWidth; ++free) {
      line[free] = line[kBucketWidth + free] = 0;
      clear_scores(table, bucket, free);
    }
  }
}
DYNEMB_SIMD_VARIANTS(tidy_in_place, (const TidyJob& job), (job))

// Limit of buckets_of_words.
constexpr int64_t kVectorBuckets = int64_t{1} << 32;

}  // namespace

void spread_buckets(const SpreadJob& job) {
  const int64_t old_count = job.table.bucket_count;
  const bool fits_window = job.bucket_count <= kMostLinesABucket * old_count;
  if (fits_window && job.bucket_count < kVectorBuckets) return spread_through_window(job);
  scatter_buckets(job);
}

void tidy_buckets(const TableView& table, int64_t begin, int64_t end, Leftovers* rest) {
  table.bucket_count < kVectorBuckets
      ? tidy_in_place({table, begin, end, rest})
      : scatter_buckets({table, begin, end, table.bucket_count, rest});
}

}  // namespace dynemb::cpu
