#include "cuda/optimizer/part.cuh"

template dynemb::cuda::LaunchUpdate dynemb::cuda::launch_of_part<4>(int64_t optimizer);
