// Streams that ops have used, which are waited for before memory is given back.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace dynemb::cuda {

// Streams of torch live as long as the process; an external one must outlive the tables that it
// used.
void note_stream(int32_t device, cudaStream_t stream);

// Waits for all of a device's streams that ops have used. A wait for the device itself would
// invalidate a capture of any thread. Does not throw, for destructors; false: one of the streams is
// being captured, or the device fails.
bool wait_for_used_streams(int32_t device);

}  // namespace dynemb::cuda
