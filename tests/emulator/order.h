// The emulator's side of emulator/order.h: where kernels, blocks and threads begin, end and meet.
#pragma once

#include <cstddef>

namespace emulator {

// The thread that runs, -1 outside of a kernel.
int running_thread();

#if defined(EMULATOR_RACES)
void begin_grid_order();
void end_grid_order();
// `shared`: memory that the block has for itself.
void begin_block_order(void* shared, size_t bytes);
void begin_thread_order();
void end_thread_order();
void fence_order();
// A new address at which threads of the block meet.
char* new_meeting();
void arrive(char* meeting);
void leave(char* meeting);
#else
inline void begin_grid_order() {}
inline void end_grid_order() {}
inline void begin_block_order(void*, size_t) {}
inline void begin_thread_order() {}
inline void end_thread_order() {}
inline void fence_order() {}
inline char* new_meeting() { return nullptr; }
inline void arrive(char*) {}
inline void leave(char*) {}
#endif

}  // namespace emulator
