// Hashes of byte strings.
#pragma once

#include <cstdint>

namespace dynemb {

enum StringHash : int64_t {
  kHashFarm = 0,      // farmhash.h; without a seed
  kHashMurmur3 = 1,   // murmurhash64 of murmurhash.h; a seed of 32 bits
  kHashMurmur64a = 2  // murmurhash64a of murmurhash.h; a seed of 64 bits
};

}  // namespace dynemb
