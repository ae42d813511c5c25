// CUDA's words for a host compiler: a block is a process, its threads are threads, its shared memory is the process's
// static memory, global memory is shared between the processes. Enough to run paper.cu without a GPU.
#pragma once
#include <sched.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <barrier>
#include <memory>
#include <vector>

#define __device__
#define __global__
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

struct Dim3 {
  unsigned x;
};
struct uint2 {
  uint32_t x, y;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }

inline thread_local Dim3 threadIdx;
inline Dim3 blockIdx, blockDim, gridDim;

struct Block {
  explicit Block(int num_threads) : all(num_threads) {
    for (int warp = 0; warp < num_threads / 32; ++warp) warps.push_back(std::make_unique<std::barrier<>>(32));
  }
  std::barrier<> all;
  std::vector<std::unique_ptr<std::barrier<>>> warps;
  unsigned ballots[64][32] = {};
};
inline Block* block;

inline void __syncthreads() { block->all.arrive_and_wait(); }
inline void __threadfence() {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  sched_yield();
}

inline unsigned __ballot_sync(unsigned, bool predicate) {
  const unsigned warp = threadIdx.x / 32;
  block->ballots[warp][threadIdx.x & 31] = predicate;
  block->warps[warp]->arrive_and_wait();
  unsigned votes = 0;
  for (int lane = 0; lane < 32; ++lane) votes |= block->ballots[warp][lane] << lane;
  block->warps[warp]->arrive_and_wait();
  return votes;
}

inline int __ffs(int x) { return __builtin_ffs(x); }
inline long long clock64() { return 0; }
template <typename T>
T min(T a, T b) {
  return std::min(a, b);
}
inline uint32_t atomicAdd(uint32_t* address, uint32_t value) {
  return __atomic_fetch_add(address, value, __ATOMIC_SEQ_CST);
}
inline uint32_t atomicMax(uint32_t* address, uint32_t value) {
  uint32_t old = __atomic_load_n(address, __ATOMIC_SEQ_CST);
  while (old < value && !__atomic_compare_exchange_n(address, &old, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
  }
  return old;
}
inline unsigned long long atomicCAS(unsigned long long* address, unsigned long long expected, unsigned long long value) {
  __atomic_compare_exchange_n(address, &expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return expected;
}
