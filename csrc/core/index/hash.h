// Hashes of ids. Bucket addresses are taken from the high bits of a hash by multiplication, so
// bucket counts are arbitrary and an order-preserving growth is possible (see bucket.h).
#pragma once

#include "core/host_device.h"

namespace dynemb {

// MurmurHash3's 64-bit finaliser (Appleby, public domain): a bijection on 64-bit words.
DYNEMB_HD uint64_t fmix64(uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdULL;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ULL;
  x ^= x >> 33;
  return x;
}

// High 64 bits of a 64 x 64 bit product.
DYNEMB_HD uint64_t multiply_high(uint64_t a, uint64_t b) {
#if defined(__CUDA_ARCH__)
  return __umul64hi(a, b);
#else
  return static_cast<uint64_t>((static_cast<unsigned __int128>(a) * b) >> 64);
#endif
}

// Salt of the bucket hash of a table: derived from its seed, and different from the seed of its
// rows.
DYNEMB_HD uint64_t bucket_salt(int64_t table_seed) {
  return fmix64(static_cast<uint64_t>(table_seed) ^ 0x6a09e667f3bcc909ULL);
}

// First hash of an id in a table. Its high bits address the first candidate bucket.
DYNEMB_HD uint64_t first_hash(int64_t id, uint64_t salt) {
  return fmix64(static_cast<uint64_t>(id) ^ salt);
}

// Second hash, from the first: addresses the second candidate bucket. All 64 bits are mixed again,
// so ids that share a first bucket spread over all second buckets.
DYNEMB_HD uint64_t second_hash(uint64_t first) { return fmix64(first + 0x9e3779b97f4a7c15ULL); }

DYNEMB_HD int64_t bucket_of(uint64_t hash, int64_t bucket_count) {
  return static_cast<int64_t>(multiply_high(hash, static_cast<uint64_t>(bucket_count)));
}

}  // namespace dynemb
