#include "cuda/optimizer/part.cuh"

template dynemb::cuda::LaunchUpdate dynemb::cuda::launch_of_part<5>(int64_t optimizer);
