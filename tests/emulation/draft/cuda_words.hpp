// CUDA's words on the emulated machine of emulated_simt.hpp, as far as the draft kernels use them.
#pragma once
#include <float.h>
#include <stdint.h>

#include <algorithm>

#include "../emulated_simt.hpp"

#define __device__
#define __forceinline__ inline
#define __noinline__

namespace simt = flashtrie::simt;
using std::max;
using std::min;

struct Index3 {
  unsigned x, y, z;
};
inline Index3 gridDim;
inline Index3 thread_index() { return {simt::thread(), 0, 0}; }
inline Index3 block_index() {
  const unsigned at = simt::block();
  return {at % gridDim.x, at / gridDim.x % gridDim.y, at / gridDim.x / gridDim.y};
}
#define threadIdx thread_index()
#define blockIdx block_index()

inline void __syncthreads() { simt::sync_block(); }
inline void __syncwarp() { simt::sync_warp(); }
inline std::vector<int> block_flags;
inline bool __syncthreads_or(bool flag) {
  simt::sync_block();
  block_flags[simt::block()] = 0;
  simt::sync_block();
  if (flag) block_flags[simt::block()] = 1;
  simt::sync_block();
  const bool any = block_flags[simt::block()] != 0;
  simt::sync_block();
  return any;
}
inline int __syncthreads_count(bool flag) {
  simt::sync_block();
  block_flags[simt::block()] = 0;
  simt::sync_block();
  block_flags[simt::block()] += flag ? 1 : 0;
  simt::sync_block();
  const int count = block_flags[simt::block()];
  simt::sync_block();
  return count;
}
inline uint32_t __ballot_sync(unsigned, bool vote) { return simt::ballot(vote); }
inline bool __any_sync(unsigned, bool vote) { return simt::any(vote); }
template <typename T>
T __shfl_sync(unsigned, T value, int from) {
  static_assert(sizeof(T) == 4, "one word");
  uint32_t bits;
  memcpy(&bits, &value, 4);
  bits = simt::shuffle(bits, static_cast<uint32_t>(from));
  memcpy(&value, &bits, 4);
  return value;
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int step) {
  return __shfl_sync(mask, value, static_cast<int>(simt::lane()) ^ step);
}
inline uint32_t atomicInc(uint32_t* at, uint32_t last) { return simt::atomic_increment(at, last); }
inline uint32_t atomicAdd(uint32_t* at, uint32_t value) { return simt::atomic_add(at, value); }

inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __ffs(uint32_t x) { return __builtin_ffs(static_cast<int>(x)); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline float __uint_as_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
inline uint32_t __float_as_uint(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

struct uint4 {
  uint32_t x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) ulonglong2 {
  unsigned long long x, y;
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
template <typename T>
T __ldcs(const T* at) {
  if (reinterpret_cast<uintptr_t>(at) % sizeof(T) != 0) abort();  // as the GPU would
  return *at;
}
template <typename T>
T __ldcg(const T* at) {
  return __ldcs(at);
}

struct __half {
  uint16_t bits;
};
inline __half __ushort_as_half(unsigned short bits) { return {bits}; }
inline float __half2float(__half x) { return simt::half_to_float(x.bits); }
struct __half2 {
  __half low, high;
};
struct __nv_bfloat162 {
  uint16_t low, high;
};
