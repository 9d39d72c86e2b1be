// Initial values of rows: a pure function of (seed, id, column). The seed is that of the table.
//
// A table's initializer is a list of records in the float64 tensor `init_data`, each for a range of
// columns. The eight initializers of the Python side use these kinds.
#pragma once

#include "core/rows/normal_quantile.h"
#include "core/rows/philox.h"

namespace dynemb {

enum InitKind : int {
  kInitConstant = 0,         // p0
  kInitUniform = 1,          // [p0, p0 + p1)
  kInitNormal = 2,           // mean p0, standard deviation p1
  kInitTruncatedNormal = 3,  // mean p0, deviation p1, cdf of bounds p2 .. p2 + p3, bounds p4, p5
  kInitVector = 4            // values at init_data[p0 + column - first column]
};

enum InitColumn : int {
  kInitFirstColumn = 0,
  kInitEndColumn = 1,
  kInitKindColumn = 2,
  kInitParameters = 3,  // p0 .. p5
  kInitRecordColumns = 10
};

struct InitParameters {
  float p0, p1, p2, p3, p4, p5;
};

DYNEMB_HD InitParameters init_parameters(const double* record) {
  const double* p = record + kInitParameters;
  return {static_cast<float>(p[0]), static_cast<float>(p[1]), static_cast<float>(p[2]),
          static_cast<float>(p[3]), static_cast<float>(p[4]), static_cast<float>(p[5])};
}

// The random words of columns 4 * block .. 4 * block + 3 of an id's row.
DYNEMB_HD Philox4 row_random_words(int64_t seed, int64_t id, uint32_t block) {
  const uint64_t s = static_cast<uint64_t>(seed);
  const uint64_t i = static_cast<uint64_t>(id);
  return philox4x32(static_cast<uint32_t>(i), static_cast<uint32_t>(i >> 32), block, 0,
                    static_cast<uint32_t>(s), static_cast<uint32_t>(s >> 32));
}

DYNEMB_HD float uniform_unit(uint32_t word) {  // [0, 1), 24 bits
  return static_cast<float>(static_cast<int32_t>(word >> 8)) * 5.9604644775390625e-8f;
}

DYNEMB_HD float uniform_value(uint32_t word, const InitParameters& p) {
  return p.p0 + uniform_unit(word) * p.p1;
}

// One sign bit and 31 bits of probability, so both tails have the same resolution (6.2 sigma).
DYNEMB_HD float normal_tail(uint32_t word) {
  return (static_cast<float>(static_cast<int32_t>(word >> 1)) + 0.5f) * 2.3283064365386963e-10f;
}
// `quantile`: normal_quantile(tail - 0.5f, tail).
DYNEMB_HD float normal_of_quantile(uint32_t word, float quantile, const InitParameters& p) {
  return p.p0 + ((word & 1u) != 0 ? -quantile : quantile) * p.p1;
}
DYNEMB_HD float normal_value(uint32_t word, const InitParameters& p) {
  const float tail = normal_tail(word);
  return normal_of_quantile(word, normal_quantile(tail - 0.5f, tail), p);
}

DYNEMB_HD float truncated_probability(uint32_t word, const InitParameters& p) {
  return p.p2 + uniform_unit(word) * p.p3;
}
DYNEMB_HD float truncated_tail(float probability) {
  const float low = probability < 1.0f - probability ? probability : 1.0f - probability;
  return low > 1.0e-10f ? low : 1.0e-10f;
}
// `quantile`: normal_quantile(probability - 0.5f, tail).
DYNEMB_HD float truncated_normal_of_quantile(float quantile, const InitParameters& p) {
  const float value = p.p0 + quantile * p.p1;
  const float above = value < p.p4 ? p.p4 : value;
  return above > p.p5 ? p.p5 : above;
}
DYNEMB_HD float truncated_normal_value(uint32_t word, const InitParameters& p) {
  const float probability = truncated_probability(word, p);
  const float quantile = normal_quantile(probability - 0.5f, truncated_tail(probability));
  return truncated_normal_of_quantile(quantile, p);
}

// The initial value of one column, from its random word. `records` records begin at `begin`.
DYNEMB_HD float initial_value(const double* init_data, int64_t begin, int64_t records,
                              int64_t column, uint32_t word) {
  for (int64_t r = 0; r < records; ++r) {
    const double* record = init_data + begin + r * kInitRecordColumns;
    const int64_t first = static_cast<int64_t>(record[kInitFirstColumn]);
    if (column < first || column >= static_cast<int64_t>(record[kInitEndColumn])) continue;
    const InitParameters p = init_parameters(record);
    switch (static_cast<int>(record[kInitKindColumn])) {
      case kInitUniform:
        return uniform_value(word, p);
      case kInitNormal:
        return normal_value(word, p);
      case kInitTruncatedNormal:
        return truncated_normal_value(word, p);
      case kInitVector:
        return static_cast<float>(
            init_data[static_cast<int64_t>(record[kInitParameters]) + column - first]);
      default:
        return p.p0;
    }
  }
  return 0.0f;  // no record has the column
}

}  // namespace dynemb
