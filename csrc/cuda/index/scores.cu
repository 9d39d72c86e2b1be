// get_scores, set_scores_ and combine_scores_: scores of ids in the index.
#include <tuple>

#include "arguments/combines.h"
#include "core/policy/combine.h"
#include "core/policy/decisions.h"
#include "cuda/gradient/runs.h"
#include "cuda/index/args.h"

namespace dynemb::cuda {
namespace {

// A thread per id. As find_ids (find.cu); calls visit(position, score word of the slot, or nullptr
// if the id is missing).
template <class F>
__device__ __forceinline__ void visit_score(const IndexArgs& index, const FeatureArgs& features,
                                            int64_t word, const F& visit) {
  const int64_t i = thread_number();
  if (i >= features.count) return;
  const int64_t id = features.ids[i];
  const int64_t t = features.table_of(i);
  const TableView table = table_view(index, t);
  const FoundSlot at = find_slot(table, id);
  // a table without scores has none to visit: the CPU, which can read meta, raises
  const bool scored = at.stored != 0 && table.scores != nullptr;
  visit(i, scored ? table.score(at.bucket, at.slot) + word * kBucketWidth : nullptr);
}

// 8 bytes of score at random, 9 in order.
__global__ void read_scores(IndexArgs index, FeatureArgs features, ErrorSink errors,
                            int64_t threads, int64_t word, int64_t* values, bool* found) {
  if (thread_number() < threads) check_offset(features, errors, thread_number());
  visit_score(index, features, word, [&](int64_t i, const int64_t* score) {
    found[i] = score != nullptr;
    values[i] = score == nullptr ? 0 : *score;
  });
}

// The least value, so that raise_scores leaves the largest of those given for an id. 8 bytes of
// score at random, 1 in order.
__global__ void clear_scores(IndexArgs index, FeatureArgs features, ErrorSink errors,
                             int64_t threads, int64_t word, bool* found) {
  if (thread_number() < threads) check_offset(features, errors, thread_number());
  visit_score(index, features, word, [&](int64_t i, int64_t* score) {
    found[i] = score != nullptr;
    if (score != nullptr) store_racing(score, int64_t{INT64_MIN});  // the same for all threads
  });
}

// One atomic at random, 8 bytes in order.
__global__ void raise_scores(IndexArgs index, FeatureArgs features, int64_t word,
                             const int64_t* values) {
  visit_score(index, features, word, [&](int64_t i, int64_t* score) {
    if (score == nullptr) return;
    atomicMax(reinterpret_cast<long long*>(score), static_cast<long long>(values[i]));
  });
}

// Of the features of a call, on the device.
struct FeatureCombines {
  const int64_t* how;  // Combine
  const int64_t* half_life;
  const int64_t* clock;
};

// The least value for ids of features with kCombineLast. As clear_scores, without found.
__global__ void clear_last_scores(IndexArgs index, FeatureArgs features, FeatureCombines combines,
                                  int64_t word) {
  visit_score(index, features, word, [&](int64_t i, int64_t* score) {
    if (score == nullptr || combines.how[features.feature_of(i)] != kCombineLast) return;
    store_racing(score, int64_t{INT64_MIN});  // the same for all threads
  });
}

// A thread per occurrence: its score word among those of the index, or `missing`. 8 bytes in order.
__global__ void find_score_words(IndexArgs index, FeatureArgs features, FeatureCombines combines,
                                 ErrorSink errors, int64_t threads, int64_t word, uint64_t missing,
                                 uint64_t* keys, uint32_t* positions) {
  if (thread_number() < threads) check_offset(features, errors, thread_number());
  visit_score(index, features, word, [&](int64_t i, const int64_t* score) {
    const bool wanted = score != nullptr && combines.how[features.feature_of(i)] != kCombineNone;
    keys[i] = wanted ? static_cast<uint64_t>(score - index.scores) : missing;
    positions[i] = static_cast<uint32_t>(i);
  });
}

// A thread per id with its occurrences, in order: decayed sums are rounded. Reads and writes 8
// bytes of score at random; reads 12 bytes an occurrence.
__global__ void combine_scores(IndexArgs index, FeatureArgs features, FeatureCombines combines,
                               const uint64_t* keys, const uint32_t* positions,
                               const int32_t* begin, const int64_t* head, const int64_t* values) {
  const int64_t runs = head[kRunCount];
  for (int64_t r = thread_number(); r < runs; r += thread_total()) {
    int64_t* score = index.scores + keys[begin[r]];
    int64_t sum = *score;
    for (int64_t i = begin[r]; i < begin[r + 1]; ++i) {
      const int64_t position = positions[i];
      const int64_t feature = features.feature_of(position);
      const int64_t how = combines.how[feature];
      const int64_t time = decay_time_now(combines.half_life[feature], combines.clock);
      sum = combined_score(how, sum, brought_score(how, values[position], time));
    }
    *score = sum;
  }
}

// The index and the ids of a call, checked.
struct ScoreCall {
  IndexArgs index;
  FeatureArgs features;
  Scratch scratch;

  ScoreCall(const Call& call, const Tensor& buckets, const Tensor& scores, const Tensor& tables,
            const Tensor& meta, const Tensor& ids, const Tensor& offsets,
            const std::vector<int64_t>& feature_tables, int64_t word)
      : index(index_args(call, buckets, &scores, tables, meta)) {
    features = feature_args(call, ids, offsets, feature_tables, index.table_count, nullptr);
    check_score_word(call.op, word, index.score_words);
    const auto words = scratch.add<int64_t>(features.features);
    scratch.allocate(call);
    upload_words(call, feature_tables, scratch.get(words));
    features.table = scratch.get(words);
  }
};

// Scores of ids (0 for missing ones), and which ids are in their tables.
std::tuple<Tensor, Tensor> get_scores(Tensor buckets, Tensor scores, Tensor tables, Tensor meta,
                                      Tensor ids, Tensor offsets,
                                      std::vector<int64_t> feature_tables, int64_t word) {
  const Call call("get_scores", "buckets", buckets);
  const ScoreCall scored(call, buckets, scores, tables, meta, ids, offsets, feature_tables, word);
  Tensor values = call.empty({scored.features.count}, ScalarType::Long);
  Tensor found = call.empty({scored.features.count}, ScalarType::Bool);
  const int64_t threads = scored.features.threads();
  call.launch(read_scores, threads, 0, scored.index, scored.features, error_sink(call), threads,
              word, static_cast<int64_t*>(values.data_ptr()), static_cast<bool*>(found.data_ptr()));
  return {values, found};
}

// Sets the scores of the ids in their tables, to the largest value given for an id; returns which
// ids are there.
Tensor set_scores_(Tensor buckets, Tensor scores, Tensor tables, Tensor meta, Tensor ids,
                   Tensor offsets, std::vector<int64_t> feature_tables, Tensor values,
                   int64_t word) {
  const Call call("set_scores_", "buckets", buckets);
  const ScoreCall scored(call, buckets, scores, tables, meta, ids, offsets, feature_tables, word);
  const int64_t* value = id_words(call, "values", values, scored.features.count);
  Tensor found = call.empty({scored.features.count}, ScalarType::Bool);
  const int64_t threads = scored.features.threads();
  call.launch(clear_scores, threads, 0, scored.index, scored.features, error_sink(call), threads,
              word, static_cast<bool*>(found.data_ptr()));
  call.launch(raise_scores, scored.features.count, 0, scored.index, scored.features, word, value);
  return found;
}

// Combines the custom scores of the ids in their tables with those that a lookup brings, as the
// CPU in the order of occurrence.
void combine_scores_(Tensor buckets, Tensor scores, Tensor tables, Tensor meta, Tensor clock,
                     Tensor ids, Tensor offsets, std::vector<int64_t> feature_tables, Tensor values,
                     std::vector<int64_t> combines, std::vector<int64_t> half_lives, int64_t word) {
  const Call call("combine_scores_", "buckets", buckets);
  const ScoreCall scored(call, buckets, scores, tables, meta, ids, offsets, feature_tables, word);
  const int64_t* value = id_words(call, "values", values, scored.features.count);
  const CombineArgs checked =
      combine_args(call, scored.index.table_count, clock, combines, half_lives,
                   static_cast<size_t>(scored.features.features));
  const int64_t count = scored.features.count;
  const int64_t words = scores.numel();
  const RunSort<uint64_t> sort(call, count, bits_for(words + 1));
  Scratch scratch;
  const auto how = scratch.add<int64_t>(scored.features.features);
  const auto half_life = scratch.add<int64_t>(scored.features.features);
  const auto positions = scratch.add<uint32_t>(count);
  const auto begin = scratch.add<int32_t>(count + 1);
  const auto head = scratch.add<int64_t>(kRunHeadWords);
  scratch.allocate(call);
  upload_words(call, combines, scratch.get(how));
  upload_words(call, half_lives, scratch.get(half_life));
  call.fill(scratch.get(head), 0, kRunHeadWords * 8);
  const FeatureCombines on_device{scratch.get(how), scratch.get(half_life), checked.clock};
  if (checked.any_last) {
    call.launch(clear_last_scores, count, 0, scored.index, scored.features, on_device, word);
  }
  const int64_t threads = scored.features.threads();
  call.launch(find_score_words, threads, 0, scored.index, scored.features, on_device,
              error_sink(call), threads, word, static_cast<uint64_t>(words), sort.keys(),
              sort.unsorted());
  if (count == 0) return;
  sort.find(call, static_cast<uint64_t>(words), scratch.get(positions), scratch.get(begin),
            scratch.get(head));
  call.launch_strided(combine_scores, count, scored.index, scored.features, on_device,
                      sort.sorted(), scratch.get(positions), scratch.get(begin), scratch.get(head),
                      value);
}

}  // namespace
}  // namespace dynemb::cuda

DYNEMB_IMPLEMENT_OPS(m) {
  m.impl("get_scores", TORCH_BOX(&dynemb::cuda::get_scores));
  m.impl("set_scores_", TORCH_BOX(&dynemb::cuda::set_scores_));
  m.impl("combine_scores_", TORCH_BOX(&dynemb::cuda::combine_scores_));
}
