// Which thread of a kernel has seen what of other threads, for ThreadSanitizer; nothing in other
// builds. Every CUDA thread is one of its threads, and only what is written here orders them.
//
//   begin and end of a kernel   all of it comes after the host's thread, which then sees it all
//   __syncthreads, __syncwarp   release by each thread before, acquire of all after
//   other functions of a warp   nothing: CUDA says that they order no memory
//   __threadfence*              what the thread has seen by then is released by its later atomic
//                               writes; what was released at the addresses of its earlier atomic
//                               reads is acquired
//   atomics, volatile           relaxed
#pragma once

#if defined(EMULATOR_RACES)
namespace emulator {

// Called with the address of an atomic access, a write before it is made, a read after it.
void order_before_write(const volatile void* address);
void order_after_read(const volatile void* address);

}  // namespace emulator
#endif
