#include "cpu/gradient/runs.h"

#include <algorithm>
#include <cstring>

#include "cpu/gradient/radix_sort.h"
#include "cpu/rows/row_sums.h"
#include "cpu/runtime/simd.h"

namespace dynemb::cpu {
namespace {

constexpr int64_t kGradientsAhead = 12;  // occurrences between prefetch and sum of a gradient

// Gradient row of an occurrence, and its factor.
struct Occurrence {
  const float* gradient;
  float factor;
};

// Whether factors other than 1 may occur.
DYNEMB_INLINE bool has_factors(const GradientSource& source) {
  return source.lookup->pooling != kPoolNone &&
         (source.lookup->id_weights != nullptr || source.lookup->pooling == kPoolMean);
}

DYNEMB_INLINE Occurrence occurrence(const GradientSource& source, int64_t position) {
  const LookupArgs& lookup = *source.lookup;
  if (lookup.pooling == kPoolNone) return {source.gradient + position * lookup.columns, 1.0f};
  const int64_t bag = source.bag_of(position);
  float factor = lookup.id_weights == nullptr ? 1.0f : lookup.id_weights[position];
  if (lookup.pooling == kPoolMean) factor = source.divisor[bag].divide(factor);
  int64_t feature = 0;
  int64_t row = bag;
  if (lookup.column.size() > 1) {
    feature = bag / lookup.batch;
    row = bag - feature * lookup.batch;
  }
  return {source.gradient + row * lookup.columns + lookup.column[feature], factor};
}

// sum[c] = the first occurrence's + the second one's + ...
DYNEMB_INLINE void sum_occurrences(const GradientSource& source, const GradientRuns& runs,
                                   int64_t begin, int64_t end, float* sum) {
  const int64_t dim = runs.dim;
  const Occurrence first = occurrence(source, runs.position(begin));
  for (int64_t c = 0; c < dim; ++c) sum[c] = first.factor * first.gradient[c];
  const bool weighted = has_factors(source);
  const float* gradient[kRowsAtOnce];
  float factor[kRowsAtOnce];
  for (int64_t i = begin + 1; i < end;) {
    const int64_t rows = std::min(kRowsAtOnce, end - i);
    for (int64_t k = 0; k < rows; ++k, ++i) {
      const Occurrence next = occurrence(source, runs.position(i));
      gradient[k] = next.gradient;
      factor[k] = next.factor;
    }
    if (weighted) {
      add_rows<true>(gradient, factor, rows, dim, sum);
    } else {
      add_rows<false>(gradient, factor, rows, dim, sum);
    }
  }
}

struct PieceJob {
  const GradientSource* source;
  const GradientRuns* runs;
  int64_t begin;
  int64_t end;
  float* sum;
};
DYNEMB_INLINE void sum_piece_body(const PieceJob& job) {
  sum_occurrences(*job.source, *job.runs, job.begin, job.end, job.sum);
}
DYNEMB_SIMD_VARIANTS(sum_piece, (const PieceJob& job), (job))

DYNEMB_INLINE void sum_runs_simd_body(const RunSumJob& job) {
  const GradientSource& source = *job.source;
  const GradientRuns& runs = *job.runs;
  const LongRuns& long_runs = *job.long_runs;
  size_t next_long = std::lower_bound(long_runs.run.begin(), long_runs.run.end(), job.begin) -
                     long_runs.run.begin();
  const auto occurrences = static_cast<int64_t>(runs.sorted.size());
  for (int64_t r = job.begin; r < job.end; ++r) {
    const int64_t begin = runs.run[r];
    const int64_t end = runs.run[r + 1];
    for (int64_t i = begin + kGradientsAhead; i < std::min(end + kGradientsAhead, occurrences);
         ++i) {
      const float* gradient = occurrence(source, runs.position(i)).gradient;
      for (int64_t c = 0; c < std::min<int64_t>(runs.dim, 128); c += 16) {
        __builtin_prefetch(gradient + c);
      }
    }
    float* sum = job.buffer + (r - job.begin) * runs.dim;
    job.sum[r - job.begin] = sum;
    if (next_long < long_runs.run.size() && long_runs.run[next_long] == r) {
      const float* piece = long_runs.sums.data() + long_runs.first_piece[next_long] * runs.dim;
      const int64_t pieces = (end - begin + kPieceLength - 1) / kPieceLength;
      std::memcpy(sum, piece, sizeof(float) * static_cast<size_t>(runs.dim));
      for (int64_t p = 1; p < pieces; ++p) {
        for (int64_t c = 0; c < runs.dim; ++c) sum[c] += piece[p * runs.dim + c];
      }
      ++next_long;
      continue;
    }
    if (end - begin == 1) {
      const Occurrence only = occurrence(source, runs.position(begin));
      if (only.factor == 1.0f) {
        job.sum[r - job.begin] = only.gradient;
        continue;
      }
    }
    sum_occurrences(source, runs, begin, end, sum);
  }
}
DYNEMB_SIMD_VARIANTS(sum_runs_simd, (const RunSumJob& job), (job))

}  // namespace

int bits_for(uint64_t values) {
  int bits = 0;
  while (bits < 63 && (uint64_t{1} << bits) < values) ++bits;
  return bits;
}

namespace {

BagLength bag_length(const LookupArgs& lookup, int64_t bags) {
  // for so few ids the product with the inverse is exact
  if (bags == 0 || lookup.features.count >= (int64_t{1} << 31)) return {};
  const int64_t length = lookup.offsets[1] - lookup.offsets[0];
  if (length < 2) return {};
  for (int64_t b = 0; b <= bags; ++b) {
    if (lookup.offsets[b] != b * length) return {};
  }
  return {~uint64_t{0} / static_cast<uint64_t>(length) + 1};
}

}  // namespace

GradientSource gradient_source(const char* op, const LookupArgs& lookup, const Tensor& gradient) {
  const bool pooled = lookup.pooling != kPoolNone;
  GradientSource source;
  source.gradient =
      output_gradient(op, gradient, pooled ? lookup.batch : lookup.features.count, lookup.columns);
  source.lookup = &lookup;
  if (!pooled) return source;
  const int64_t bags = lookup.batch * static_cast<int64_t>(lookup.features.table.size());
  DYNEMB_CHECK(bags < (int64_t{1} << 31), "dynemb::", op, ": ", bags,
               " bags, expected fewer than 2^31: split the batch");
  source.equal_length = bag_length(lookup, bags);
  const bool writes_bags = source.equal_length.inverse == 0;
  if (!writes_bags && lookup.pooling != kPoolMean) return source;
  if (writes_bags) source.bag.resize(lookup.features.count);
  if (lookup.pooling == kPoolMean) source.divisor.resize(bags);
  constexpr int64_t kBagsPerUnit = 512;
  parallel_units((bags + kBagsPerUnit - 1) / kBagsPerUnit, lookup.features.count,
                 [&](int64_t begin, int64_t end) {
                   const int64_t last = std::min(end * kBagsPerUnit, bags);
                   for (int64_t b = begin * kBagsPerUnit; b < last; ++b) {
                     const int64_t ids_end = writes_bags ? lookup.offsets[b + 1] : 0;
                     for (int64_t i = lookup.offsets[b]; i < ids_end; ++i) {
                       source.bag[i] = static_cast<int32_t>(b);
                     }
                     if (!source.divisor.empty()) source.divisor[b] = bag_divisor(lookup, b);
                   }
                 });
  return source;
}

namespace {

// Features in the sort order of their occurrences, and where each table begins.
struct SortOrder {
  std::vector<size_t> feature;
  std::vector<size_t> table;  // positions in `feature`, and their number at the end
};

// By table if there is too much to sort for the caches: no row is of two tables. Otherwise all
// features are sorted together.
SortOrder sort_order(const LookupArgs& lookup, const std::vector<TableRows>& tables, int64_t slab) {
  constexpr int64_t kOccurrences = 1 << 16;
  const std::vector<int64_t>& table_of = lookup.features.table;
  SortOrder order;
  int64_t occurrences = 0;
  for (size_t f = 0; f < table_of.size(); ++f) {
    if (tables[table_of[f]].slab != slab) continue;
    order.feature.push_back(f);
    occurrences += lookup.features.begin[f + 1] - lookup.features.begin[f];
  }
  order.table.push_back(0);
  if (occurrences >= kOccurrences) {
    std::stable_sort(order.feature.begin(), order.feature.end(),
                     [&](size_t a, size_t b) { return table_of[a] < table_of[b]; });
    for (size_t k = 1; k < order.feature.size(); ++k) {
      if (table_of[order.feature[k]] != table_of[order.feature[k - 1]]) order.table.push_back(k);
    }
  }
  order.table.push_back(order.feature.size());
  return order;
}

// Handles with a row: the highest one, and whether all have one generation.
struct HandleRange {
  int64_t highest = 0;
  int64_t some = -1;  // any of them, -1: there are none
  int64_t differ = 0;

  void take(int64_t handle) {
    if (some < 0) some = handle;
    highest = std::max(highest, handle);
    differ |= handle ^ some;
  }
  void take(const HandleRange& other) {
    if (other.some < 0) return;
    take(other.some);
    differ |= other.differ;
    highest = std::max(highest, other.highest);
  }
  bool one_generation() const { return some >= 0 && (differ & kGenerationMask) == 0; }
};

// Occurrences [begin, end) of a feature; one thread makes their keys.
struct KeyPiece {
  int64_t begin;
  int64_t end;
  bool ends_part;  // the last piece of a part that is sorted separately
  HandleRange handles;
  int64_t keys;
  int64_t key;  // where its keys begin
};

std::vector<KeyPiece> key_pieces(const LookupArgs& lookup, const SortOrder& order) {
  constexpr int64_t kOccurrences = 1 << 13;
  std::vector<KeyPiece> pieces;
  for (size_t t = 0; t + 1 < order.table.size(); ++t) {
    for (size_t k = order.table[t]; k < order.table[t + 1]; ++k) {
      const size_t f = order.feature[k];
      const int64_t end = lookup.features.begin[f + 1];
      for (int64_t i = lookup.features.begin[f]; i < end; i += kOccurrences) {
        pieces.push_back({i, std::min(i + kOccurrences, end), false, {}, 0, 0});
      }
    }
    if (!pieces.empty()) pieces.back().ends_part = true;
  }
  return pieces;
}

void count_keys(const LookupArgs& lookup, KeyPiece* piece) {
  HandleRange handles;
  int64_t keys = 0;
  for (int64_t i = piece->begin; i < piece->end; ++i) {
    if (lookup.handles[i] < 0) continue;
    handles.take(lookup.handles[i]);
    ++keys;
  }
  piece->handles = handles;
  piece->keys = keys;
}

void write_keys(const LookupArgs& lookup, const KeyPiece& piece, int position_bits, uint64_t* key) {
  for (int64_t i = piece.begin; i < piece.end; ++i) {
    const int64_t handle = lookup.handles[i];
    if (handle < 0) continue;
    *key++ = static_cast<uint64_t>(handle_row(handle)) << position_bits | static_cast<uint64_t>(i);
  }
}

// A run begins where the row of sorted occurrences changes.
void find_runs(GradientRuns* runs) {
  constexpr int64_t kOccurrences = 1 << 13;
  const uint64_t* sorted = runs->sorted.data();
  const int position_bits = runs->position_bits;
  const auto count = static_cast<int64_t>(runs->sorted.size());
  const int64_t pieces = (count + kOccurrences - 1) / kOccurrences;
  const auto begins = [&](int64_t i) {
    return i == 0 || (sorted[i] >> position_bits) != (sorted[i - 1] >> position_bits);
  };
  std::vector<int64_t> first_run(static_cast<size_t>(pieces) + 1, 0);
  parallel_units(pieces, count, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      const int64_t last = std::min((p + 1) * kOccurrences, count);
      int64_t heads = 0;
      for (int64_t i = p * kOccurrences; i < last; ++i) heads += begins(i);
      first_run[p + 1] = heads;
    }
  });
  for (int64_t p = 0; p < pieces; ++p) first_run[p + 1] += first_run[p];
  runs->run.resize(first_run[pieces] + 1);
  parallel_units(pieces, count, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      int64_t* run = runs->run.data() + first_run[p];
      const int64_t* const run_end = runs->run.data() + first_run[p + 1];
      // written whether it begins a run or not: a branch would be unpredictable
      for (int64_t i = p * kOccurrences; run < run_end; ++i) {
        *run = i;
        run += begins(i);
      }
    }
  });
  runs->run[first_run[pieces]] = count;
}

}  // namespace

GradientRuns gradient_runs(const char* op, const LookupArgs& lookup,
                           const std::vector<TableRows>& tables, int64_t slab, int64_t dim) {
  GradientRuns runs;
  runs.slab = slab;
  runs.dim = dim;
  runs.handles = lookup.handles;
  runs.position_bits = bits_for(static_cast<uint64_t>(lookup.features.count));
  const SortOrder order = sort_order(lookup, tables, slab);
  std::vector<KeyPiece> pieces = key_pieces(lookup, order);
  const auto piece_count = static_cast<int64_t>(pieces.size());
  const auto piece_work = [&](auto work) {
    parallel_units(piece_count, lookup.features.count, [&](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; ++p) work(&pieces[p]);
    });
  };
  piece_work([&](KeyPiece* piece) { count_keys(lookup, piece); });
  int64_t with_row = 0;
  HandleRange all;
  std::vector<size_t> part = {0};  // parts that are sorted separately
  for (int64_t p = 0; p < piece_count; ++p) {
    pieces[p].key = with_row;
    with_row += pieces[p].keys;
    all.take(pieces[p].handles);
    if (pieces[p].ends_part) part.push_back(static_cast<size_t>(with_row));
  }
  runs.generation = all.one_generation() ? handle_generation(all.some) : -1;
  const uint64_t row_count = static_cast<uint64_t>(handle_row(all.highest)) + 1;
  const int row_bits = bits_for(row_count);
  DYNEMB_CHECK(row_bits + runs.position_bits <= 64, "dynemb::", op, ": ", lookup.features.count,
               " ids into ", row_count, " rows are too many for one backward: split the batch");
  runs.sorted.resize(with_row);
  piece_work([&](KeyPiece* piece) {
    write_keys(lookup, *piece, runs.position_bits, runs.sorted.data() + piece->key);
  });
  radix_sort_parts(runs.sorted, part, runs.position_bits, runs.position_bits + row_bits);
  find_runs(&runs);
  return runs;
}

LongRuns sum_long_runs(const GradientSource& source, const GradientRuns& runs) {
  LongRuns result;
  std::vector<PieceJob> pieces;
  // A run longer than a piece has at least two of these occurrences. Checking all runs would take
  // one thread a hundredth of a step.
  constexpr int64_t kStride = kPieceLength / 2;
  const auto occurrences = static_cast<int64_t>(runs.sorted.size());
  for (int64_t sample = kStride; sample < occurrences; sample += kStride) {
    if (runs.row(sample) != runs.row(sample - kStride)) continue;
    const int64_t r =
        std::upper_bound(runs.run.begin(), runs.run.end(), sample) - runs.run.begin() - 1;
    const int64_t begin = runs.run[r];
    const int64_t end = runs.run[r + 1];
    if (end - begin <= kPieceLength) continue;
    sample = end - 1 - (end - 1) % kStride;  // the last sample in this run
    result.run.push_back(r);
    result.first_piece.push_back(static_cast<int64_t>(pieces.size()));
    for (int64_t i = begin; i < end; i += kPieceLength) {
      pieces.push_back({&source, &runs, i, std::min(i + kPieceLength, end), nullptr});
    }
  }
  result.sums.resize(pieces.size() * static_cast<size_t>(runs.dim));
  const int64_t count = static_cast<int64_t>(pieces.size());
  parallel_units(count, count * kPieceLength, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      pieces[p].sum = result.sums.data() + p * runs.dim;
      sum_piece(pieces[p]);
    }
  });
  return result;
}

void sum_runs(const RunSumJob& job) { sum_runs_simd(job); }

}  // namespace dynemb::cpu
