// CUDA's keywords, vector types and built-in variables.
#pragma once

#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
// One block runs at a time, so its shared memory can be static. It is filled before each block.
// Each declaration has a section of its own, because variables of inline functions cannot share one
// with others; shared_memory.ld joins them.
#define EMULATOR_SECTION(number) EMULATOR_SECTION_OF(number)
#define EMULATOR_SECTION_OF(number) "emulated_shared_" #number
#define __shared__ static __attribute__((section(EMULATOR_SECTION(__COUNTER__))))

#define EMULATOR_VECTOR2(name, type)                       \
  struct alignas(2 * sizeof(type)) name##2 { type x, y; }; \
  inline name##2 make_##name##2(type x, type y) { return {x, y}; }
#define EMULATOR_VECTOR3(name, type) \
  struct name##3 { type x, y, z; };  \
  inline name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; }
#define EMULATOR_VECTOR4(name, type)                             \
  struct alignas(4 * sizeof(type)) name##4 { type x, y, z, w; }; \
  inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }

EMULATOR_VECTOR2(char, signed char)
EMULATOR_VECTOR2(uchar, unsigned char)
EMULATOR_VECTOR2(short, short)
EMULATOR_VECTOR2(ushort, unsigned short)
EMULATOR_VECTOR2(int, int)
EMULATOR_VECTOR2(uint, unsigned)
EMULATOR_VECTOR2(float, float)
EMULATOR_VECTOR2(long, long)
EMULATOR_VECTOR2(ulong, unsigned long)
EMULATOR_VECTOR2(longlong, long long)
EMULATOR_VECTOR2(ulonglong, unsigned long long)
EMULATOR_VECTOR2(double, double)
EMULATOR_VECTOR3(int, int)
EMULATOR_VECTOR3(uint, unsigned)
EMULATOR_VECTOR3(float, float)
EMULATOR_VECTOR4(char, signed char)
EMULATOR_VECTOR4(uchar, unsigned char)
EMULATOR_VECTOR4(short, short)
EMULATOR_VECTOR4(ushort, unsigned short)
EMULATOR_VECTOR4(int, int)
EMULATOR_VECTOR4(uint, unsigned)
EMULATOR_VECTOR4(float, float)

#undef EMULATOR_VECTOR2
#undef EMULATOR_VECTOR3
#undef EMULATOR_VECTOR4

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_size = 1, unsigned y_size = 1, unsigned z_size = 1)
      : x(x_size), y(y_size), z(z_size) {}
  constexpr dim3(uint3 sizes) : x(sizes.x), y(sizes.y), z(sizes.z) {}
};

// Set by the emulator before it lets a thread run; launches take turns, so one copy is enough.
extern uint3 threadIdx;
extern uint3 blockIdx;
extern dim3 blockDim;
extern dim3 gridDim;
constexpr int warpSize = 32;
