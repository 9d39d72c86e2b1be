#include "arguments/routing.h"

namespace dynemb {
namespace {

void check_integers(const char* op, const char* name, size_t i, const Tensor& tensor) {
  check_defined(op, name, i, tensor);
  const ScalarType dtype = tensor.scalar_type();
  DYNEMB_CHECK(dtype == ScalarType::Long || dtype == ScalarType::Int, "dynemb::", op, ": ",
               entry_name(name, i), " has dtype ", dtype_name(dtype), ", expected int64 or int32");
  DYNEMB_CHECK(tensor.is_contiguous(), "dynemb::", op, ": ", entry_name(name, i),
               " is not contiguous: call .contiguous()");
}

int64_t is_wide(const Tensor& tensor) { return tensor.scalar_type() == ScalarType::Long ? 1 : 0; }

}  // namespace

void check_part(const char* op, int64_t parts, int64_t part) {
  DYNEMB_CHECK(parts >= 1, "dynemb::", op, ": parts is ", parts, ", expected at least 1");
  DYNEMB_CHECK(part >= 0 && part < parts, "dynemb::", op, ": part is ", part, ", expected 0 to ",
               parts - 1);
}

void check_slots(const char* op, int64_t parts, int64_t slots) {
  DYNEMB_CHECK(parts >= 1, "dynemb::", op, ": parts is ", parts, ", expected at least 1");
  DYNEMB_CHECK(parts <= slots, "dynemb::", op, ": parts is ", parts,
               ", expected at most the number of slots, ", slots);
}

GroupedIds grouped_tensors(const CallContext& call, const Tensor& ids, const Tensor& offsets) {
  check_words(call, "ids", ids);
  check_words(call, "offsets", offsets);
  const int64_t groups = offsets.size(0) - 1;
  DYNEMB_CHECK(groups >= 0, "dynemb::", call.op, ": offsets is empty, expected [groups + 1]");
  return {static_cast<const int64_t*>(ids.data_ptr()), ids.size(0),
          static_cast<const int64_t*>(offsets.data_ptr()), groups};
}

std::vector<FeatureBags> feature_bags(const CallContext& call, const std::vector<Tensor>& ids,
                                      const std::vector<Tensor>& offsets,
                                      const std::vector<int64_t>& ragged, int64_t bags) {
  const auto features = static_cast<int64_t>(ids.size());
  check_entries(call.op, "ids", ids.size(), ids.size());
  DYNEMB_CHECK(bags >= 0, "dynemb::", call.op, ": bags is ", bags, ", expected at least 0");
  result_bytes(call.op, "bags", bags, {features, bags}, 8);
  DYNEMB_CHECK(ragged.size() == offsets.size(), "dynemb::", call.op, ": ragged names ",
               ragged.size(), " features, expected one for each of ", offsets.size(), " offsets");
  std::vector<FeatureBags> result;
  int64_t begin = 0;
  for (size_t f = 0; f < ids.size(); ++f) {
    check_integers(call.op, "ids", f, ids[f]);
    const int64_t count = ids[f].numel();
    result.push_back({ids[f].data_ptr(), nullptr, is_wide(ids[f]), 0, -1, 0,
                      bags > 0 ? count / bags : 0, begin, count});
    begin += count;
  }
  for (size_t k = 0; k < offsets.size(); ++k) {
    DYNEMB_CHECK(ragged[k] >= 0 && ragged[k] < features && result[ragged[k]].entry < 0,
                 "dynemb::", call.op, ": ", entry_name("ragged", k), " is ", ragged[k],
                 ", expected another feature of 0 to ", features - 1);
    check_integers(call.op, "offsets", k, offsets[k]);
    const int64_t entries = offsets[k].numel();
    DYNEMB_CHECK(offsets[k].dim() == 1 && (entries == bags || entries == bags + 1),
                 "dynemb::", call.op, ": ", entry_name("offsets", k), " has ", offsets[k].dim(),
                 " dimensions and ", entries, " elements, expected 1 and ", bags, " or ", bags + 1);
    FeatureBags& feature = result[ragged[k]];
    feature.offsets = offsets[k].data_ptr();
    feature.offsets_wide = is_wide(offsets[k]);
    feature.entry = static_cast<int64_t>(k);
    feature.has_end = entries > bags ? 1 : 0;
  }
  for (size_t f = 0; f < ids.size(); ++f) {
    const FeatureBags& feature = result[f];
    DYNEMB_CHECK(feature.entry >= 0 || feature.length * bags == feature.count, "dynemb::", call.op,
                 ": ", entry_name("ids", f), " has ", feature.count, " elements, expected ", bags,
                 " bags of equal length, or offsets");
  }
  check_devices(call, "ids", ids);
  check_devices(call, "offsets", offsets);
  return result;
}

}  // namespace dynemb
