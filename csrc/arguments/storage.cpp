#include "arguments/storage.h"

namespace dynemb {

void check_summed_bytes(const char* op, const Tensor& data, int64_t crc) {
  check_defined(op, "data", data);
  STD_TORCH_CHECK(data.is_cpu(), "dynemb::", op, ": data is on ", device_name(data), ", but ", op,
                  " sums bytes in host memory: copy to the CPU first, with .cpu()");
  STD_TORCH_CHECK(data.is_contiguous(), "dynemb::", op,
                  ": data is not contiguous: call .contiguous()");
  STD_TORCH_CHECK(crc >= 0 && crc <= UINT32_MAX, "dynemb::", op, ": crc is ", crc,
                  ", expected 0 to ", UINT32_MAX, ", the sum so far");
}

}  // namespace dynemb
