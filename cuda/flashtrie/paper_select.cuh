// Algorithm 5 of the FlashTrie paper: the best of an append-only buffer by block merge sort and a tournament of merges.
// Input: keys that differ, larger is better, 0 is none. Output: the best `width`, descending, as run 0, the same from
// any number of blocks.
#pragma once
#include "paper_batch.cuh"

#if defined(__CUDACC__) || defined(FT_EMULATION)
#include <cub/block/block_merge_sort.cuh>

namespace flashtrie {

__device__ inline uint32_t load_acquire(const uint32_t* address) {
  uint32_t value;
#if defined(__CUDA_ARCH__)
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
#else  // the tests' emulation
  __atomic_load(address, &value, __ATOMIC_ACQUIRE);
#endif
  return value;
}

struct Descending {
  __device__ bool operator()(uint64_t a, uint64_t b) const { return a > b; }
};

template <int kItems>
using PaperSort = cub::BlockMergeSort<uint64_t, kPaperThreads, kItems, uint32_t>;

// Sorted runs of `width` keys and values each, in global memory, and the blocks that work on them together.
struct PaperRuns {
  uint64_t* keys;
  uint32_t* values;
  uint32_t rank, num_blocks;    // this block's place in its group
  unsigned char* sort_memory;   // shared; a sort's storage, or two runs

  // The best `width` of `count`; returns how many. Values: given, or the place in the buffer. `barrier` makes the
  // whole group wait, and is called alike by all its blocks.
  template <typename Barrier>
  __device__ uint32_t select(const uint64_t* from, const uint32_t* from_values, uint32_t count, uint32_t width,
                             const Barrier& barrier) const {
    const uint32_t chunk = static_cast<uint32_t>(paper_chunk(width));
    const uint32_t num_runs = (count + chunk - 1) / chunk;
    for (uint32_t run = rank; run < num_runs; run += num_blocks) {
      if (chunk == 512)
        sort_chunk<1>(from, from_values, count, width, run);
      else if (chunk == 1024)
        sort_chunk<2>(from, from_values, count, width, run);
      else if (chunk == 2048)
        sort_chunk<4>(from, from_values, count, width, run);
      else
        sort_chunk<8>(from, from_values, count, width, run);
    }
    for (uint32_t stride = 1; stride < num_runs; stride *= 2) {
      barrier();
      for (uint32_t run = 2 * stride * rank; run + stride < num_runs; run += 2 * stride * num_blocks)
        merge(run, run + stride, width);
    }
    __syncthreads();
    return min(count, width);
  }

 private:
  template <int kItems>
  __device__ void sort_chunk(const uint64_t* from, const uint32_t* from_values, uint32_t count, uint32_t width,
                             uint32_t run) const {
    const uint32_t begin = run * kPaperThreads * kItems + threadIdx.x * kItems;
    uint64_t own_keys[kItems];
    uint32_t own_values[kItems];
    for (int i = 0; i < kItems; ++i) {
      const uint32_t at = begin + i;
      own_keys[i] = at < count ? from[at] : 0;
      own_values[i] = at < count && from_values != nullptr ? from_values[at] : at;
    }
    auto& storage = *reinterpret_cast<typename PaperSort<kItems>::TempStorage*>(sort_memory);
    PaperSort<kItems>(storage).Sort(own_keys, own_values, Descending());
    for (int i = 0; i < kItems; ++i) {
      const uint32_t place = threadIdx.x * kItems + i;
      if (place >= width) break;
      keys[uint64_t(run) * width + place] = own_keys[i];
      values[uint64_t(run) * width + place] = own_values[i];
    }
    __syncthreads();
  }

  // The best `width` of two runs into the first. A key's rank is its place plus how many of the other run beat it.
  // What fills a short run up is 0 and beats nothing; the first run's keys are all written over, since no rank falls.
  __device__ void merge(uint32_t to, uint32_t from, uint32_t width) const {
    uint64_t* both = reinterpret_cast<uint64_t*>(sort_memory);
    uint32_t* both_values = reinterpret_cast<uint32_t*>(both + 2 * width);
    for (uint32_t i = threadIdx.x; i < 2 * width; i += kPaperThreads) {
      const uint64_t at = i < width ? uint64_t(to) * width + i : uint64_t(from) * width + i - width;
      both[i] = keys[at];
      both_values[i] = values[at];
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < 2 * width; i += kPaperThreads) {
      const uint64_t key = both[i];
      if (key == 0) continue;
      const uint64_t* other = i < width ? both + width : both;
      uint32_t low = 0, high = width;
      while (low < high) {
        const uint32_t middle = (low + high) / 2;
        if (other[middle] > key)
          low = middle + 1;
        else
          high = middle;
      }
      const uint32_t place = low + (i < width ? i : i - width);
      if (place >= width) continue;
      keys[uint64_t(to) * width + place] = key;
      values[uint64_t(to) * width + place] = both_values[i];
    }
    __syncthreads();
  }
};

}  // namespace flashtrie
#endif
