// CRC-32C, the checksum of iSCSI (RFC 3720, appendix B.4), by tables computed at compile time: for
// processors without an instruction for it, and to combine checksums of parts.
//
// A checksum is a polynomial over GF(2), the bit of the highest power last. Functions here take and
// return the register of the division, which is the complement of a checksum.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dynemb {

constexpr uint32_t kCrc32cPolynomial = 0x82F63B78;  // 0x1EDC6F41, the bits reversed

// Bytes that one step of crc32c_by_tables takes.
constexpr size_t kCrc32cSlices = 8;

struct Crc32cTables {
  uint32_t of[kCrc32cSlices][256];  // [k][b]: the register after byte b and k bytes of 0
};

constexpr Crc32cTables make_crc32c_tables() {
  Crc32cTables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? kCrc32cPolynomial : 0);
    tables.of[0][byte] = crc;
  }
  for (size_t k = 1; k < kCrc32cSlices; ++k) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t crc = tables.of[k - 1][byte];
      tables.of[k][byte] = (crc >> 8) ^ tables.of[0][crc & 0xFF];
    }
  }
  return tables;
}

inline constexpr Crc32cTables kCrc32cTables = make_crc32c_tables();

// The register after `bytes` more bytes: eight in each step, since their contributions are
// independent (Kounavis and Berry, "slicing by 8").
inline uint32_t crc32c_by_tables(uint32_t crc, const unsigned char* data, size_t bytes) {
  const auto& of = kCrc32cTables.of;
  for (; bytes >= kCrc32cSlices; bytes -= kCrc32cSlices, data += kCrc32cSlices) {
    const uint32_t low =
        crc ^ (static_cast<uint32_t>(data[0]) | static_cast<uint32_t>(data[1]) << 8 |
               static_cast<uint32_t>(data[2]) << 16 | static_cast<uint32_t>(data[3]) << 24);
    crc = of[7][low & 0xFF] ^ of[6][(low >> 8) & 0xFF] ^ of[5][(low >> 16) & 0xFF] ^
          of[4][low >> 24] ^ of[3][data[4]] ^ of[2][data[5]] ^ of[1][data[6]] ^ of[0][data[7]];
  }
  for (; bytes > 0; --bytes, ++data) crc = (crc >> 8) ^ of[0][(crc ^ *data) & 0xFF];
  return crc;
}

// The product of two polynomials, modulo that of the checksum.
constexpr uint32_t crc32c_product(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t power = uint32_t{1} << 31; power != 0; power >>= 1) {
    if ((a & power) != 0) product ^= b;
    b = (b >> 1) ^ ((b & 1) != 0 ? kCrc32cPolynomial : 0);
  }
  return product;
}

// The effect of a fixed number of zero bytes on a register.
struct Crc32cZeros {
  uint32_t of[4][256];  // [k][b]: of a register with byte k equal to b, and zeros elsewhere

  constexpr uint32_t after(uint32_t crc) const {
    return of[0][crc & 0xFF] ^ of[1][(crc >> 8) & 0xFF] ^ of[2][(crc >> 16) & 0xFF] ^
           of[3][crc >> 24];
  }
};

constexpr Crc32cZeros make_crc32c_zeros(size_t bytes) {
  uint32_t shift = uint32_t{1} << 31;   // the polynomial 1
  uint32_t square = uint32_t{1} << 23;  // x to the 8: a byte
  for (; bytes > 0; bytes >>= 1) {
    if ((bytes & 1) != 0) shift = crc32c_product(shift, square);
    square = crc32c_product(square, square);
  }
  Crc32cZeros zeros{};
  for (uint32_t k = 0; k < 4; ++k) {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      zeros.of[k][byte] = crc32c_product(shift, byte << (8 * k));
    }
  }
  return zeros;
}

}  // namespace dynemb
