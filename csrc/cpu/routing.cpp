// mix_ids, unmix_ids: ids on their way to the shard that owns them.
#include "core/routing.h"

#include <torch/csrc/stable/library.h>

#include "cpu/index_view.h"

namespace dynemb::cpu {
namespace {

template <class Map>
Tensor mapped(const Tensor& ids, const Map& map) {
  const int64_t count = ids.size(0);
  Tensor result = empty_cpu({count}, ScalarType::Long);
  const auto* from = static_cast<const int64_t*>(ids.data_ptr());
  auto* to = static_cast<int64_t*>(result.data_ptr());
  constexpr int64_t kChunk = 1 << 14;
  parallel_units((count + kChunk - 1) / kChunk, count, [&](int64_t begin, int64_t end) {
    const int64_t last = end * kChunk < count ? end * kChunk : count;
    for (int64_t i = begin * kChunk; i < last; ++i) {
      to[i] = static_cast<int64_t>(map(static_cast<uint64_t>(from[i])));
    }
  });
  return result;
}

Tensor mix_ids(Tensor ids) {
  check_words("mix_ids", "ids", ids);
  return mapped(ids, [](uint64_t id) { return mix_id(id); });
}

Tensor unmix_ids(Tensor quotients, int64_t parts, int64_t part) {
  check_words("unmix_ids", "quotients", quotients);
  check_part("unmix_ids", parts, part);
  const auto p = static_cast<uint64_t>(parts);
  const auto r = static_cast<uint64_t>(part);
  return mapped(quotients, [p, r](uint64_t quotient) { return routed_id(quotient, p, r); });
}

}  // namespace
}  // namespace dynemb::cpu

STABLE_TORCH_LIBRARY_IMPL(dynemb, CPU, m) {
  m.impl("mix_ids", TORCH_BOX(&dynemb::cpu::mix_ids));
  m.impl("unmix_ids", TORCH_BOX(&dynemb::cpu::unmix_ids));
}
