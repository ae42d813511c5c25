// Words that blocks leave for one another in device memory (nvcc only). A word is its own flag: places are zero between
// launches, what is left there is not, and who takes it puts the zero back. So a word costs its way to L2 and back, and no
// fence, no ticket and no second read.
//
// Whoever waits must know that the senders run. Every block of a batch row comes for a ticket as it begins, and the finisher is
// the one that came last: all the others had begun by then, and they wait for nobody. A block more than there are chunks
// holds back for a while, so as to be the last: it has nothing else to do, and is ready when the words come.
#pragma once
#include "draft_block.cuh"

#if defined(__CUDACC__) || defined(FT_EMULATION)

namespace flashtrie {

constexpr uint64_t kNothing = 1;  // a word that stands for no key: below all keys
constexpr int kLeastKeys = 8;

// Keys that a chunk sends, 8, 16 or 32 (a power of two): the top_k best, and then kNothing.
__device__ __forceinline__ int chunk_keys(int top_k) { return power_of_two_at_least(max(top_k, kLeastKeys)); }

__device__ __forceinline__ void send(uint64_t* to, uint64_t word) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
#else
  *to = word;
#endif
}

// What is there now, zero perhaps.
__device__ __forceinline__ uint64_t look(const uint64_t* from) {
#if defined(__CUDA_ARCH__)
  uint64_t word;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
  return word;
#else
  simt::maybe_yield();
  return *from;
#endif
}

__device__ __forceinline__ uint32_t look(const uint32_t* from) {
#if defined(__CUDA_ARCH__)
  uint32_t word;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(from) : "memory");
  return word;
#else
  simt::maybe_yield();
  return *from;
#endif
}

// The whole warp has looked and some lane wants to look again.
__device__ __forceinline__ void wait_a_little() {
#if !defined(__CUDA_ARCH__)
  simt::yield();
#endif
}

// Numbers the callers 0 to count - 1 and starts anew.
__device__ __forceinline__ uint32_t take_ticket(uint32_t* counter, uint32_t count) {
#if defined(__CUDA_ARCH__)
  uint32_t ticket;
  asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(ticket)
               : "l"(counter), "r"(count - 1)
               : "memory");
#else
  const uint32_t ticket = *counter;
  *counter = ticket >= count - 1 ? 0 : ticket + 1;
#endif
  return ticket;
}

// Most looks of a block that holds back. Blocks begin in order on every GPU known, so that it needs one or two; the emulated
// machine has no order.
#if defined(FT_EMULATION)
constexpr int kPatience = 8;
#else
constexpr int kPatience = 64;
#endif

// One thread: whether this block is the last of `count` to come for a ticket; it waits for the others, but not for ever.
__device__ __forceinline__ bool comes_last(uint32_t* counter, uint32_t count) {
  for (int turn = 0; turn < kPatience; ++turn) {
    if (look(counter) == count - 1) {
      *counter = 0;  // nobody else will come
      return true;
    }
    wait_a_little();
  }
  return take_ticket(counter, count) == count - 1;
}

// A sum as a word. It is never zero: where the base is 0, the sum is at least about 1.
__device__ __forceinline__ uint64_t sum_word(ExpSum sum) {
  return static_cast<uint64_t>(__float_as_uint(sum.sum)) << 32 | __float_as_uint(sum.base);
}

__device__ __forceinline__ ExpSum word_sum(uint64_t word) {
  return {__uint_as_float(static_cast<uint32_t>(word)), __uint_as_float(static_cast<uint32_t>(word >> 32))};
}

// One warp takes the sums of a row's chunks, which an earlier launch left, and leaves zeros.
__device__ __forceinline__ ExpSum take_sums(uint64_t* sums, int num_chunks, int lane) {
  ExpSum joined{-INFINITY, 0.0f};
#pragma unroll 1
  for (int first = 0; first < num_chunks; first += 32) {
    ExpSum part = joined;
    part.sum = 0.0f;
    if (first + lane < num_chunks) {
      part = word_sum(sums[first + lane]);
      sums[first + lane] = 0;
    }
    joined = join(joined, warp_join(part));
  }
  return joined;
}

}  // namespace flashtrie
#endif
