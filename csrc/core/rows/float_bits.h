// Floats as their bits.
#pragma once

#include <cstring>

#include "core/host_device.h"

namespace dynemb {

DYNEMB_HD uint32_t float_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
DYNEMB_HD float float_from_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}
// The same of one number or of several: From and To have as many bits.
template <class To, class From>
DYNEMB_HD To bits_as(From from) {
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

}  // namespace dynemb
