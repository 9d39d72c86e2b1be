// mix_ids, unmix_ids, id_owners, ids_encode: ids and the shards that own them.
#include <torch/csrc/stable/library.h>

#include "arguments/routing.h"
#include "core/features/routing.h"
#include "cpu/features/lists.h"

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

Tensor id_owners(Tensor ids, int64_t parts, int64_t slots) {
  check_words("id_owners", "ids", ids);
  check_slots("id_owners", parts, slots);
  const SlotRanges ranges =
      make_slot_ranges(static_cast<uint64_t>(parts), static_cast<uint64_t>(slots));
  return mapped(ids, [ranges](uint64_t id) { return owner_of(id, ranges); });
}

Tensor ids_encode(std::vector<Tensor> ids, std::vector<int64_t> tables) {
  const char* op = "ids_encode";
  check_list(op, "ids", ids, ids.size(), ScalarType::Long, kAnyDims);
  check_entries(op, "tables", tables.size(), ids.size());
  const std::vector<int64_t> begin = element_begins(ids);
  Tensor encoded = empty_cpu({begin.back()}, ScalarType::Long);
  auto* to = static_cast<uint64_t*>(encoded.data_ptr());
  for_each_range(begin, 1, [&](size_t f, int64_t first, int64_t last) {
    const auto* from = static_cast<const uint64_t*>(ids[f].data_ptr());
    const uint64_t table = mix_id(static_cast<uint64_t>(tables[f]));
    for (int64_t i = first; i < last; ++i) to[begin[f] + i] = encoded_id(from[i], table);
  });
  return encoded;
}

}  // namespace
}  // namespace dynemb::cpu

STABLE_TORCH_LIBRARY_IMPL(dynemb, CPU, m) {
  m.impl("mix_ids", TORCH_BOX(&dynemb::cpu::mix_ids));
  m.impl("unmix_ids", TORCH_BOX(&dynemb::cpu::unmix_ids));
  m.impl("id_owners", TORCH_BOX(&dynemb::cpu::id_owners));
  m.impl("ids_encode", TORCH_BOX(&dynemb::cpu::ids_encode));
}
