#include "cuda/optimizer/part.cuh"

template dynemb::cuda::LaunchUpdate dynemb::cuda::launch_of_part<1>(int64_t optimizer);
