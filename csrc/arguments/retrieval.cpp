#include "arguments/retrieval.h"

#include <utility>

namespace dynemb {

const int64_t* sample_seed(const CallContext& call, const Tensor& seed, int64_t samples) {
  check_words(call, "seed", seed);
  check_length(call.op, "seed", seed, 1);
  DYNEMB_CHECK(samples >= 0, "dynemb::", call.op, ": samples is ", samples,
               ", expected at least 0");
  result_bytes(call.op, "samples", samples, {samples}, 8);
  return static_cast<const int64_t*>(seed.data_ptr());
}

TopKTensors top_k_tensors(const CallContext& call, const Tensor& scores, const Tensor& ids,
                          const Tensor& best_scores, const Tensor& best_ids) {
  check_tensor(call, "scores", scores, ScalarType::Float);
  check_tensor(call, "best_scores", best_scores, ScalarType::Float);
  check_tensor(call, "best_ids", best_ids, ScalarType::Long);
  for (const auto& [name, tensor] :
       {std::pair{"scores", &scores}, std::pair{"best_scores", &best_scores},
        std::pair{"best_ids", &best_ids}}) {
    DYNEMB_CHECK(tensor->dim() == 2, "dynemb::", call.op, ": ", name, " has ", tensor->dim(),
                 " dimensions, expected 2");
  }
  check_words(call, "ids", ids);
  check_length(call.op, "ids", ids, scores.size(1));
  check_size(call.op, "best_scores", best_scores, 0, scores.size(0));
  check_size(call.op, "best_ids", best_ids, 0, scores.size(0));
  check_size(call.op, "best_ids", best_ids, 1, best_scores.size(1));
  return {static_cast<const float*>(scores.data_ptr()),
          static_cast<const int64_t*>(ids.data_ptr()),
          static_cast<const float*>(best_scores.data_ptr()),
          static_cast<const int64_t*>(best_ids.data_ptr()),
          scores.size(0),
          scores.size(1),
          best_scores.size(1)};
}

}  // namespace dynemb
