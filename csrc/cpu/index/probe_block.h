// Hashes, buckets and matches of several ids at once, computed while lines of the index are being
// fetched.
#pragma once

#include <cstring>

#include "cpu/index/probe.h"

namespace dynemb::cpu {

// Number of ids with lines in flight together.
constexpr int64_t kProbeBlock = 64;

// fmix64 of core/index/hash.h, of each word.
DYNEMB_INLINE UnsignedWords4 fmix64_words(UnsignedWords4 x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdULL;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ULL;
  x ^= x >> 33;
  return x;
}

// bucket_of each hash, for fewer than 2^32 buckets: of the product of the lower halves, only the
// carry counts.
DYNEMB_INLINE UnsignedWords4 buckets_of_words(UnsignedWords4 hash, uint64_t bucket_count) {
  const UnsignedWords4 low = (hash & 0xffffffffULL) * bucket_count;
  return ((hash >> 32) * bucket_count + (low >> 32)) >> 32;
}

// Indexes of fewer buckets fit into the second-level cache. Fetching a line from there early saves
// the short wait; see cpu/runtime/prefetch.h for larger ones.
constexpr int64_t kNearBuckets = (int64_t{1} << 20) / (kBucketWords * 8);

template <bool kNear>
DYNEMB_INLINE void fetch_line(const int64_t* line) {
  if constexpr (!kNear) return prefetch_line(line);
  for (int word = 0; word < kBucketWords; word += 8) __builtin_prefetch(line + word);
}

// First hashes and first buckets of `count` ids; prefetches the buckets.
template <bool kNear>
DYNEMB_INLINE void fetch_lines(const TableView& table, const int64_t* ids, int64_t count,
                               uint64_t* hash, int64_t* bucket) {
  int64_t* const lines = table.lines;  // copies, so that stores below cannot change them
  const int64_t bucket_count = table.bucket_count;
  const uint64_t salt = table.salt;
  int64_t i = 0;
  if (bucket_count < int64_t{1} << 32) {
    for (; i + 4 <= count; i += 4) {
      UnsignedWords4 words;
      std::memcpy(&words, ids + i, sizeof words);
      words = fmix64_words(words ^ salt);
      std::memcpy(hash + i, &words, sizeof words);
      words = buckets_of_words(words, static_cast<uint64_t>(bucket_count));
      std::memcpy(bucket + i, &words, sizeof words);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) fetch_line<kNear>(lines + words[j] * kBucketWords);
    }
  }
  for (; i < count; ++i) {
    hash[i] = first_hash(ids[i], salt);
    bucket[i] = bucket_of(hash[i], bucket_count);
    fetch_line<kNear>(lines + bucket[i] * kBucketWords);
  }
}
DYNEMB_INLINE void fetch_lines(const TableView& table, const int64_t* ids, int64_t count,
                               uint64_t* hash, int64_t* bucket) {
  table.bucket_count <= kNearBuckets ? fetch_lines<true>(table, ids, count, hash, bucket)
                                     : fetch_lines<false>(table, ids, count, hash, bucket);
}

// Reduces each of four vectors to one word by `either`, of two vectors.
template <class Either>
DYNEMB_INLINE Words4 reduce_four(Words4 first, Words4 second, Words4 third, Words4 fourth,
                                 const Either& either) {
  const Words4 low = either(__builtin_shuffle(first, second, Words4{0, 4, 2, 6}),
                            __builtin_shuffle(first, second, Words4{1, 5, 3, 7}));
  const Words4 high = either(__builtin_shuffle(third, fourth, Words4{0, 4, 2, 6}),
                             __builtin_shuffle(third, fourth, Words4{1, 5, 3, 7}));
  return either(__builtin_shuffle(low, high, Words4{0, 1, 4, 5}),
                __builtin_shuffle(low, high, Words4{2, 3, 6, 7}));
}

// match_stored of four ids, each in its bucket: half as many instructions as one by one.
DYNEMB_INLINE Words4 match_four(const int64_t* lines, const int64_t* bucket, const int64_t* ids) {
  static_assert(kBucketWidth == 4, "keys, and handles, are one vector");
  const auto line = [&](int i) { return lines + bucket[i] * kBucketWords; };
  const auto handles = [&](int i) { return load_words(line(i) + kBucketWidth); };
  const Words4 stored[] = {handles(0), handles(1), handles(2), handles(3)};
  acquire_fence();
  // the stored handle of the id is one of the words, and the others are 0
  const auto match = [&](int i) {
    return (load_words(line(i)) == Words4{ids[i], ids[i], ids[i], ids[i]}) & stored[i];
  };
  return reduce_four(match(0), match(1), match(2), match(3),
                     [](Words4 a, Words4 b) { return a | b; });
}

}  // namespace dynemb::cpu
