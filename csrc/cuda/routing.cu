// mix_ids, unmix_ids: ids on their way to the shard that owns them.
#include "core/routing.h"
#include "cuda/device.cuh"
#include "cuda/launch.h"

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

Tensor mix_ids(Tensor ids) {
  const Call call("mix_ids", "ids", ids);
  check_words(call.op, "ids", ids);
  const int64_t count = ids.size(0);
  Tensor mixed = call.empty({count}, ScalarType::Long);
  call.launch(mix_all, count, 0, static_cast<const uint64_t*>(ids.data_ptr()), count,
              static_cast<uint64_t*>(mixed.data_ptr()));
  return mixed;
}

Tensor unmix_ids(Tensor quotients, int64_t parts, int64_t part) {
  const Call call("unmix_ids", "quotients", quotients);
  check_words(call.op, "quotients", quotients);
  check_part(call.op, parts, part);
  const int64_t count = quotients.size(0);
  Tensor ids = call.empty({count}, ScalarType::Long);
  call.launch(unmix_all, count, 0, static_cast<const uint64_t*>(quotients.data_ptr()), count,
              static_cast<uint64_t>(parts), static_cast<uint64_t>(part),
              static_cast<uint64_t*>(ids.data_ptr()));
  return ids;
}

}  // namespace
}  // namespace dynemb::cuda

DYNEMB_IMPLEMENT_OPS(m) {
  m.impl("mix_ids", TORCH_BOX(&dynemb::cuda::mix_ids));
  m.impl("unmix_ids", TORCH_BOX(&dynemb::cuda::unmix_ids));
}
