// ids_concat: concatenates ids of many features, and the offsets of their bags.
#include "arguments/routing.h"
#include "cuda/features/lists.h"
#include "cuda/index/args.h"

namespace dynemb::cuda {
namespace {

struct ConcatJob {
  FeatureItems items;
  const FeatureBags* features;
  int64_t bags;
  int64_t* ids;
  int64_t* offsets;
};

// The offset of a bag. If two features meet at the wrong place, -1: with decreasing offsets no op
// changes a table.
__device__ __forceinline__ int64_t offset_of(const ConcatJob& job, int64_t f, int64_t bag,
                                             const ErrorSink& errors) {
  const FeatureBags& feature = job.features[f];
  if (bag == 0 && f > 0) {
    const FeatureBags& before = job.features[f - 1];
    if (!ends_right(before, job.bags)) {
      errors.report(kErrorListEnd, before.entry);
      return -1;
    }
    if (!begins_right(feature, job.bags)) {
      errors.report(kErrorListStart, feature.entry);
      return -1;
    }
  }
  return bag_begin(feature, bag, job.bags);
}

// A thread per id and per offset: 4 or 8 bytes read and 8 written in order; the search for the
// feature stays in the caches.
__global__ void concat_features(ConcatJob job, ErrorSink errors) {
  const int64_t number = thread_number();
  if (number < job.items.count) {
    const FeatureItem item = job.items.at(number);
    const FeatureBags& feature = job.features[item.feature];
    job.ids[number] = integer_at(feature.ids, feature.ids_wide, item.index);
  }
  const int64_t last = job.items.features * job.bags;
  if (number > last) return;
  const bool at_end = number == last;
  const int64_t f = at_end ? job.items.features - 1 : number / job.bags;
  const int64_t bag = at_end ? job.bags : number % job.bags;
  job.offsets[number] = offset_of(job, f, bag, errors);
}

std::tuple<Tensor, Tensor> ids_concat(std::vector<Tensor> ids, std::vector<Tensor> offsets,
                                      std::vector<int64_t> ragged, int64_t bags) {
  const Call call("ids_concat", "ids[0]", owner_of_list("ids_concat", ids));
  const std::vector<FeatureBags> features = feature_bags(call, ids, offsets, ragged, bags);
  std::vector<int64_t> feature_words(features.size() * kFeatureBagsWords);
  std::memcpy(feature_words.data(), features.data(), feature_words.size() * 8);
  FeatureWords words;
  const auto begin = words.add(element_begins(ids));
  const auto of_features = words.add(feature_words);
  words.upload(call);
  const FeatureItems items = words.items(begin);
  Tensor all_ids = call.empty({items.count}, ScalarType::Long);
  Tensor all_offsets = call.empty({items.features * bags + 1}, ScalarType::Long);
  const ConcatJob job{items, reinterpret_cast<const FeatureBags*>(words.get(of_features)), bags,
                      static_cast<int64_t*>(all_ids.data_ptr()),
                      static_cast<int64_t*>(all_offsets.data_ptr())};
  call.launch(concat_features, std::max(items.count, all_offsets.numel()), 0, job,
              error_sink(call));
  return {all_ids, all_offsets};
}

}  // namespace
}  // namespace dynemb::cuda

DYNEMB_IMPLEMENT_OPS(m) { m.impl("ids_concat", TORCH_BOX(&dynemb::cuda::ids_concat)); }
