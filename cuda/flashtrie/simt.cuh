// What a kernel needs of the machine beneath it, in one place: its lane, its block, its cluster, votes, barriers and
// atomics. Two implementations: CUDA, and an emulation on CPU fibers (tests/emulation) under which the very same
// kernel source runs, with threads interleaved at random, where there is no GPU.
//
// A "group" is the blocks that work on one query: one block, or the blocks of one cluster (sm_90 and newer), which
// reach each other's shared memory.
#pragma once
#include "bits.cuh"

#if defined(FLASHTRIE_EMULATE)
#include "emulated_simt.hpp"
#else

#define FT_DEVICE __device__ __forceinline__
#define FT_OUTLINE __device__ __noinline__  // rare, and better not between what is not

namespace flashtrie {
namespace simt {

constexpr uint32_t kAllLanes = 0xffffffffu;

FT_DEVICE uint32_t thread() { return threadIdx.x; }
FT_DEVICE uint32_t num_threads() { return blockDim.x; }
FT_DEVICE uint32_t lane() { return threadIdx.x & 31; }
FT_DEVICE uint32_t block() { return blockIdx.x; }
FT_DEVICE uint32_t num_blocks() { return gridDim.x; }
FT_DEVICE uint32_t lanes_below() { return (1u << lane()) - 1; }

FT_DEVICE void sync_block() { __syncthreads(); }
FT_DEVICE void sync_warp() { __syncwarp(); }

FT_DEVICE uint32_t ballot(bool vote) { return __ballot_sync(kAllLanes, vote); }
FT_DEVICE bool any(bool vote) { return __any_sync(kAllLanes, vote); }
FT_DEVICE uint32_t shuffle(uint32_t value, uint32_t from) { return __shfl_sync(kAllLanes, value, from); }
FT_DEVICE uint32_t shuffle_up(uint32_t value, uint32_t by) { return __shfl_up_sync(kAllLanes, value, by); }

FT_DEVICE uint32_t count_ones(uint32_t word) { return __popc(word); }
FT_DEVICE uint32_t lowest_one(uint32_t word) { return __ffs(word) - 1; }  // word must not be 0

FT_DEVICE uint32_t reduce_add(uint32_t value) {
#if __CUDA_ARCH__ >= 800
  return __reduce_add_sync(kAllLanes, value);
#else
  for (int by = 16; by > 0; by >>= 1) value += __shfl_xor_sync(kAllLanes, value, by);
  return value;
#endif
}

FT_DEVICE uint32_t reduce_or(uint32_t value) {
#if __CUDA_ARCH__ >= 800
  return __reduce_or_sync(kAllLanes, value);
#else
  for (int by = 16; by > 0; by >>= 1) value |= __shfl_xor_sync(kAllLanes, value, by);
  return value;
#endif
}

FT_DEVICE uint32_t reduce_max(uint32_t value) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(kAllLanes, value);
#else
  for (int by = 16; by > 0; by >>= 1) value = max(value, __shfl_xor_sync(kAllLanes, value, by));
  return value;
#endif
}

FT_DEVICE uint32_t atomic_add(uint32_t* at, uint32_t value) { return atomicAdd(at, value); }
FT_DEVICE uint64_t atomic_add(uint64_t* at, uint64_t value) {
  return atomicAdd(reinterpret_cast<unsigned long long*>(at), static_cast<unsigned long long>(value));
}
FT_DEVICE void atomic_or(uint32_t* at, uint32_t value) { atomicOr(at, value); }
FT_DEVICE void atomic_max(uint32_t* at, uint32_t value) { atomicMax(at, value); }
FT_DEVICE void atomic_max(uint64_t* at, uint64_t value) {
  atomicMax(reinterpret_cast<unsigned long long*>(at), static_cast<unsigned long long>(value));
}
FT_DEVICE uint32_t atomic_exchange(uint32_t* at, uint32_t value) { return atomicExch(at, value); }
// Puts `value` where `expected` is; returns what was there.
FT_DEVICE uint32_t atomic_replace(uint32_t* at, uint32_t expected, uint32_t value) { return atomicCAS(at, expected, value); }
// Adds one, or starts again from zero at `last`; returns what was there.
FT_DEVICE uint32_t atomic_increment(uint32_t* at, uint32_t last) { return atomicInc(at, last); }

// Where the entry `index` of an array lies: one instruction, which the compiler makes five of where an index has been masked.
template <typename T>
FT_DEVICE const T* at(const T* array, uint32_t index) {
  const T* place;
  asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(place) : "r"(index), "n"(sizeof(T)), "l"(array));
  return place;
}

// Reads of the trie: constant while a kernel runs, 16 bytes at a time.
struct alignas(16) Quad {
  uint32_t x, y, z, w;
};
FT_DEVICE Quad load_quad(const void* at) {
  const uint4 v = __ldg(static_cast<const uint4*>(at));
  return {v.x, v.y, v.z, v.w};
}
struct alignas(8) Pair {
  uint32_t x, y;
};
FT_DEVICE Pair load_pair(const void* at) {
  const uint2 v = __ldg(static_cast<const uint2*>(at));
  return {v.x, v.y};
}
FT_DEVICE uint64_t load_word(const uint64_t* at) { return __ldg(reinterpret_cast<const unsigned long long*>(at)); }
FT_DEVICE uint32_t load_word(const uint32_t* at) { return __ldg(at); }
FT_DEVICE uint16_t load_word(const uint16_t* at) { return __ldg(at); }

// A word that the kernel before may still be writing: what is there now, or was a while ago; after await_previous_kernel
// what that kernel left. By way of the first-level cache, since thousands of warps ask for the same few.
FT_DEVICE uint32_t load_changing(const uint32_t* at) {
  uint32_t value;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}

// Asks for what is read soon: `prefetch` brings it as far as the second-level cache, `touch` to this multiprocessor. `to` is
// a word of shared memory that only this thread has and never reads: without a place to go, the compiler drops the load.
// Nobody waits for what is written there, which racecheck reports; FLASHTRIE_SANITIZE leaves it out.
FT_DEVICE void prefetch(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }
FT_DEVICE void touch(const void* at, uint32_t* to) {
#if __CUDA_ARCH__ >= 800 && !defined(FLASHTRIE_SANITIZE)
  const uint32_t place = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(place), "l"(at));
#else
  prefetch(at);
#endif
}

// 16 bytes at a time, whatever the compiler makes of the code around; in the order in which they stand.
FT_DEVICE void store_quad(Quad* at, const Quad& quad) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(quad.x), "r"(quad.y), "r"(quad.z), "r"(quad.w) : "memory");
}
FT_DEVICE void store_pair(uint32_t* at, const Pair& pair) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(at), "r"(pair.x), "r"(pair.y) : "memory");
}
FT_DEVICE void load_quad_if(bool wanted, const Quad* at, Quad* to) {
  asm volatile(
      "{\n.reg .pred wanted;\nsetp.ne.u32 wanted, %5, 0;\n@wanted ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "+r"(to->x), "+r"(to->y), "+r"(to->z), "+r"(to->w)
      : "l"(at), "r"(static_cast<uint32_t>(wanted))
      : "memory");
}

// Launches that overlap (sm_90 and newer; nothing elsewhere): the next kernel of the stream may take its places
// already, and nothing of the kernels before may be touched until they are done.
FT_DEVICE void release_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
FT_DEVICE void await_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

FT_DEVICE float half_to_float(uint16_t bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

FT_DEVICE int64_t clock() { return clock64(); }

// Which block of its group this is.
template <int kBlocks>
FT_DEVICE uint32_t rank() {
  if (kBlocks == 1) return 0;
  uint32_t value;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(value));
  return value;
}

// The same shared variable in another block of the group.
template <int kBlocks, typename T>
FT_DEVICE T* in_block(T* mine, uint32_t rank) {
  if (kBlocks == 1) return mine;
  T* theirs;
  asm("mapa.u64 %0, %1, %2;" : "=l"(theirs) : "l"(mine), "r"(rank));
  return theirs;
}

// Barrier over the group; shared memory of all its blocks is ordered by it.
template <int kBlocks>
FT_DEVICE void sync_group() {
  if (kBlocks == 1) {
    __syncthreads();
  } else {
    // Not the .aligned form: a warp may come here diverged.
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
  }
}

}  // namespace simt
}  // namespace flashtrie
#endif
