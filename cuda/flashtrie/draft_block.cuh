// Draft trees on a GPU: the parts that a warp or a block does together, all deterministic (nvcc only).
#pragma once
#include "draft.cuh"

#if defined(__CUDACC__) || defined(FT_EMULATION)  // the tests run the kernels' source without a GPU
#if defined(__CUDACC__)
#include <cuda_fp16.h>
#endif

namespace flashtrie {

struct Bfloat16 {
  uint16_t bits;
};

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(Bfloat16 x) { return __uint_as_float(static_cast<uint32_t>(x.bits) << 16); }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }

constexpr int kDraftThreads = 256;
constexpr int kDraftWarps = kDraftThreads / 32;
constexpr int kDraftMaxTopK = 32;
constexpr int kDraftMaxNodes = 256;
constexpr unsigned kWholeWarp = 0xffffffffu;

__device__ __forceinline__ uint32_t warp_max(uint32_t x) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(kWholeWarp, x);
#else
  for (int step = 16; step > 0; step >>= 1) x = max(x, __shfl_xor_sync(kWholeWarp, x, step));
  return x;
#endif
}

__device__ __forceinline__ uint32_t warp_min(uint32_t x) {
#if __CUDA_ARCH__ >= 800
  return __reduce_min_sync(kWholeWarp, x);
#else
  return ~warp_max(~x);
#endif
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(kWholeWarp, x, step);
  return x;
}

// The number of a thread's warp, known to the compiler to be one for the whole warp, which spares it checks.
__device__ __forceinline__ int warp_index() {
  return static_cast<int>(__shfl_sync(kWholeWarp, static_cast<uint32_t>(threadIdx.x) >> 5, 0));
}

// The key of the lane whose number differs in these bits.
__device__ __forceinline__ uint64_t exchange(uint64_t key, int bits) {
  const uint32_t high = __shfl_xor_sync(kWholeWarp, static_cast<uint32_t>(key >> 32), bits);
  return static_cast<uint64_t>(high) << 32 | __shfl_xor_sync(kWholeWarp, static_cast<uint32_t>(key), bits);
}

__device__ __forceinline__ uint32_t lanes_below(int lane) { return (1u << lane) - 1; }

// exp(x) for x <= 0 within two units in the last place: one special-function instruction.
__device__ __forceinline__ float fast_exp(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.44269504f));
  return y;
#else
  return exp2f(x * 1.44269504f);
#endif
}

// A sum of exponentials relative to `base`, which is one of the terms that went into it and near enough to the largest;
// relative to 0 where the base is -inf, so that nothing becomes NaN that wasn't. NaN and +inf among the terms make the sum
// NaN.
struct ExpSum {
  float base;
  float sum;
};

__device__ __forceinline__ float exp_base(float base) { return base == -INFINITY ? 0.0f : base; }

__device__ __forceinline__ float log_sum(ExpSum sum) { return sum.base + logf(sum.sum); }

__device__ __forceinline__ bool is_bad_sum(ExpSum sum) { return !(sum.sum < INFINITY) || sum.base == INFINITY; }

__device__ __forceinline__ ExpSum join(ExpSum a, ExpSum b) {
  const float base = fmaxf(a.base, b.base), origin = exp_base(base);
  return {base, a.sum * fast_exp(a.base - origin) + b.sum * fast_exp(b.base - origin)};
}

// Partial sums of a warp's lanes, brought to one.
__device__ __forceinline__ ExpSum warp_join(ExpSum part) {
  const float base = score_of(warp_max(ordered_score(part.base)));
  return {base, warp_sum(part.sum * fast_exp(part.base - exp_base(base)))};
}

// A lower bound of the top_k-th largest of all lanes' values, given each lane's largest: the smallest of the maxima of
// groups of lanes, 32, 16 or 8 of them, but at least top_k. A group takes every 16th or 8th lane, so that lanes left without
// a value don't leave a group without one.
__device__ __forceinline__ uint32_t group_bound(uint32_t lane_max, int top_k) {
  if (top_k <= 16) lane_max = max(lane_max, __shfl_xor_sync(kWholeWarp, lane_max, 16));
  if (top_k <= 8) lane_max = max(lane_max, __shfl_xor_sync(kWholeWarp, lane_max, 8));
  return warp_min(lane_max);
}

__device__ __forceinline__ int power_of_two_at_least(int x) { return x <= 1 ? 1 : 1 << (32 - __clz(x - 1)); }

// A warp's list of a node's legal tokens: kept keys and new ones, and room to sort the kept ones into.
constexpr int kMergeCapacity = 256;
constexpr int kMergeStride = kMergeCapacity + kDraftMaxTopK;

// How many of the n keys at `list`, which is aligned to 16 bytes, are greater.
__device__ __forceinline__ int rank_among(const uint64_t* list, int n, uint64_t key) {
  const ulonglong2* pairs = reinterpret_cast<const ulonglong2*>(list);
  int rank = 0, i = 0;
#pragma unroll 1
  for (; i + 4 <= n; i += 4) {
    const ulonglong2 first = pairs[i / 2], second = pairs[i / 2 + 1];
    rank += (first.x > key ? 1 : 0) + (first.y > key ? 1 : 0) + (second.x > key ? 1 : 0) + (second.y > key ? 1 : 0);
  }
#pragma unroll 1
  for (; i < n; ++i) rank += list[i] > key ? 1 : 0;
  return rank;
}

// How many of the n keys at `list` come before `key`, looked at by a group of `lanes` lanes, a power of two, of which this is
// the `own`-th. The whole warp calls it; every lane of a group gets its number. `before(other)` is false of the key itself.
template <typename Before>
__device__ __forceinline__ int count_by_lanes(const uint64_t* list, int n, uint64_t key, int own, int lanes,
                                              const Before& before) {
  int count = 0;
#pragma unroll 1
  for (int first = own; first < n; first += 4 * lanes) {
    uint64_t others[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) others[i] = first + i * lanes < n ? list[first + i * lanes] : key;
#pragma unroll
    for (int i = 0; i < 4; ++i) count += before(others[i]) ? 1 : 0;
  }
#pragma unroll 1
  for (int step = lanes >> 1; step > 0; step >>= 1) count += __shfl_xor_sync(kWholeWarp, count, step);
  return count;
}

// Where a node came from.
struct alignas(8) DraftOrigin {
  uint32_t parent;
  uint32_t place;  // of the node in the lists
};

// A word of the mask of a node that is none: nothing, or itself.
__device__ __forceinline__ uint32_t padding_mask(const DraftSizes& sizes, int node, int word) {
  return sizes.self_padding && node >> 5 == word ? 1u << (node & 31) : 0;
}

// Masks of all nodes as words [N, W]: the ancestors of each, itself and the root included; padding has none, or itself.
// The whole block writes them, a thread a node.
template <typename ParentOf>
__device__ __forceinline__ void collect_masks(const DraftSizes& sizes, int valid, uint32_t* masks,
                                              const ParentOf& parent_of) {
  const int words = sizes.mask_words();
#pragma unroll 1
  for (int i = threadIdx.x; i < sizes.num_nodes; i += kDraftThreads) {
    uint32_t* mask = masks + i * words;
#pragma unroll 1
    for (int word = 0; word < words; ++word) mask[word] = i < valid ? 0 : padding_mask(sizes, i, word);
    if (i >= valid) continue;
    mask[0] = 1;
#pragma unroll 1
    for (uint32_t node = i; node != 0; node = parent_of(node)) mask[node >> 5] |= 1u << (node & 31);
  }
}

// Bytes of 0 or 1 from the low four bits.
__device__ __forceinline__ uint32_t spread4(uint32_t bits) { return ((bits & 15) * 0x00204081u) & 0x01010101u; }

// A thread's number where the first `busy` warps have something else to do.
__device__ __forceinline__ int thread_after(int busy) {
  return static_cast<int>((threadIdx.x + kDraftThreads - 32 * busy) % kDraftThreads);
}

// The whole block writes the masks of one batch row; `mask_of(node, word)` gives them. Small trees' parts go to warps of
// their own.
template <typename MaskOf>
__device__ __forceinline__ void write_masks(const DraftSizes& sizes, const DraftOutputs& out, int64_t batch,
                                            const MaskOf& mask_of) {
  const int size = sizes.num_nodes, words = sizes.mask_words();
  int32_t* packed = out.packed_ancestor_mask + batch * size * words;
  const int word_shift = 32 - __clz(words - 1);
#pragma unroll 1
  for (int at = thread_after(1); at < size << word_shift; at += kDraftThreads) {
    const int i = at >> word_shift, word = at & ((1 << word_shift) - 1);
    if (word < words) packed[i * words + word] = static_cast<int32_t>(mask_of(i, word));
  }
  int8_t* bytes = out.ancestor_mask + batch * size * size;
  if (size % 16 == 0 && reinterpret_cast<uintptr_t>(out.ancestor_mask) % 16 == 0) {
    const int pieces = size / 16, shift = 32 - __clz(pieces - 1);
#pragma unroll 1
    for (int at = thread_after(2); at < size << shift; at += kDraftThreads) {
      const int i = at >> shift, piece = at & ((1 << shift) - 1);
      if (piece >= pieces) continue;
      const uint32_t bits = mask_of(i, piece / 2) >> (piece % 2 * 16);
      reinterpret_cast<uint4*>(bytes)[i * pieces + piece] =
          make_uint4(spread4(bits), spread4(bits >> 4), spread4(bits >> 8), spread4(bits >> 12));
    }
  } else {
#pragma unroll 1
    for (int at = threadIdx.x; at < size * size; at += kDraftThreads) {
      const int i = at / size, key = at - i * size;
      bytes[at] = static_cast<int8_t>((mask_of(i, key / 32) >> (key % 32)) & 1);
    }
  }
}

// Brings the kernel's parameters for the outputs into the multiprocessor's cache, before they are waited for.
__device__ __forceinline__ void touch(const DraftOutputs& out) {
#if defined(__CUDA_ARCH__)
  asm volatile("" ::"l"(out.node_token_ids), "l"(out.node_depths), "l"(out.parent_ids), "l"(out.node_scores),
               "l"(out.valid_counts), "l"(out.verify_token_ids), "l"(out.verify_position_ids));
  asm volatile("" ::"l"(out.packed_ancestor_mask), "l"(out.ancestor_mask), "l"(out.context_lengths),
               "l"(out.select_token_indices), "l"(out.status), "l"(out.node_states));
#else
  (void)out;
#endif
}

// One node beside the root, as it goes out.
struct DraftNode {
  int32_t token, depth, parent;
  float cost;
  uint32_t state;
};

// The whole block writes everything about the nodes of one batch row but masks and status; `node_of(i)` gives the valid
// nodes beside the root.
template <typename NodeOf>
__device__ __forceinline__ void write_nodes(const DraftSizes& sizes, const DraftOutputs& out, int64_t batch, int32_t root,
                                            int32_t base, int valid, const NodeOf& node_of,
                                            uint32_t root_state = kNoNode) {
#pragma unroll 1
  for (int i = threadIdx.x; i < sizes.num_nodes; i += kDraftThreads) {
    const int64_t at = batch * sizes.num_nodes + i;
    const bool is_valid = i < valid;
    DraftNode node{i == 0 ? root : 0, 0, -1, 0.0f, i == 0 ? root_state : kNoNode};
    if (is_valid && i > 0) node = node_of(i);
    out.node_token_ids[at] = node.token;
    out.verify_token_ids[at] = node.token;
    out.node_depths[at] = node.depth;
    out.parent_ids[at] = node.parent;
    out.node_scores[at] = is_valid ? 0.0f - node.cost : -INFINITY;  // 0 - 0, as -0 would not be 0's bytes
    out.verify_position_ids[at] = is_valid ? base + node.depth : 0;
    out.select_token_indices[at] = i;
    if (out.node_states) out.node_states[at] = node.state;
  }
  if (threadIdx.x == 0) {
    out.valid_counts[batch] = valid;
    out.context_lengths[batch] = base + sizes.num_nodes;
  }
}

}  // namespace flashtrie
#endif
