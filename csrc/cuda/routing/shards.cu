// mix_ids, unmix_ids, id_owners, ids_encode: ids and the shards that own them.
#include "arguments/routing.h"
#include "core/features/routing.h"
#include "cuda/features/lists.h"

namespace dynemb::cuda {
namespace {

// A thread per id: 8 bytes read, 8 written, both in order.
__global__ void mix_all(const uint64_t* ids, int64_t count, uint64_t* mixed) {
  const int64_t i = thread_number();
  if (i < count) mixed[i] = mix_id(ids[i]);
}

// As mix_all.
__global__ void unmix_all(const uint64_t* quotients, int64_t count, uint64_t parts, uint64_t part,
                          uint64_t* ids) {
  const int64_t i = thread_number();
  if (i < count) ids[i] = routed_id(quotients[i], parts, part);
}

// As mix_all.
__global__ void find_owners(const uint64_t* ids, int64_t count, SlotRanges ranges,
                            uint64_t* owners) {
  const int64_t i = thread_number();
  if (i < count) owners[i] = owner_of(ids[i], ranges);
}

// As mix_all, with a search for the table's place in the list.
__global__ void encode_all(FeatureItems items, const uint64_t* const* ids,
                           const int64_t* mixed_tables, uint64_t* encoded) {
  const int64_t number = thread_number();
  if (number >= items.count) return;
  const FeatureItem item = items.at(number);
  encoded[number] =
      encoded_id(ids[item.feature][item.index], static_cast<uint64_t>(mixed_tables[item.feature]));
}

Tensor mix_ids(Tensor ids) {
  const Call call("mix_ids", "ids", ids);
  check_words(call, "ids", ids);
  const int64_t count = ids.size(0);
  Tensor mixed = call.empty({count}, ScalarType::Long);
  call.launch(mix_all, count, 0, static_cast<const uint64_t*>(ids.data_ptr()), count,
              static_cast<uint64_t*>(mixed.data_ptr()));
  return mixed;
}

Tensor unmix_ids(Tensor quotients, int64_t parts, int64_t part) {
  const Call call("unmix_ids", "quotients", quotients);
  check_words(call, "quotients", quotients);
  check_part(call.op, parts, part);
  const int64_t count = quotients.size(0);
  Tensor ids = call.empty({count}, ScalarType::Long);
  call.launch(unmix_all, count, 0, static_cast<const uint64_t*>(quotients.data_ptr()), count,
              static_cast<uint64_t>(parts), static_cast<uint64_t>(part),
              static_cast<uint64_t*>(ids.data_ptr()));
  return ids;
}

Tensor id_owners(Tensor ids, int64_t parts, int64_t slots) {
  const Call call("id_owners", "ids", ids);
  check_words(call, "ids", ids);
  check_slots(call.op, parts, slots);
  const int64_t count = ids.size(0);
  Tensor owners = call.empty({count}, ScalarType::Long);
  call.launch(find_owners, count, 0, static_cast<const uint64_t*>(ids.data_ptr()), count,
              make_slot_ranges(static_cast<uint64_t>(parts), static_cast<uint64_t>(slots)),
              static_cast<uint64_t*>(owners.data_ptr()));
  return owners;
}

Tensor ids_encode(std::vector<Tensor> ids, std::vector<int64_t> tables) {
  const Call call("ids_encode", "ids[0]", owner_of_list("ids_encode", ids));
  check_list(call, "ids", ids, ids.size(), ScalarType::Long, kAnyDims);
  check_entries(call.op, "tables", tables.size(), ids.size());
  std::vector<int64_t> mixed_tables;
  for (const int64_t table : tables) {
    mixed_tables.push_back(static_cast<int64_t>(mix_id(static_cast<uint64_t>(table))));
  }
  FeatureWords words;
  const auto begin = words.add(element_begins(ids));
  const auto from = words.add_addresses<const uint64_t>(ids);
  const auto mixed = words.add(mixed_tables);
  words.upload(call);
  const FeatureItems items = words.items(begin);
  Tensor encoded = call.empty({items.count}, ScalarType::Long);
  call.launch(encode_all, items.count, 0, items, words.get(from), words.get(mixed),
              static_cast<uint64_t*>(encoded.data_ptr()));
  return encoded;
}

}  // namespace
}  // namespace dynemb::cuda

DYNEMB_IMPLEMENT_OPS(m) {
  m.impl("mix_ids", TORCH_BOX(&dynemb::cuda::mix_ids));
  m.impl("unmix_ids", TORCH_BOX(&dynemb::cuda::unmix_ids));
  m.impl("id_owners", TORCH_BOX(&dynemb::cuda::id_owners));
  m.impl("ids_encode", TORCH_BOX(&dynemb::cuda::ids_encode));
}
