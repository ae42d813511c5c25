// Draft trees on a GPU: the parts that a warp or a block does together (nvcc only), and what the kernels are given.
//
// Contracts, all deterministic:
//   keep_best     n unique keys -> the top_k largest, descending
//   grow          candidate lists -> the tree of draft.cuh, in its order
//   write_outputs the tree -> every element of one batch row of the outputs
#pragma once
#include "draft.cuh"

#if defined(__CUDACC__)
namespace flashtrie {

constexpr int kDraftThreads = 256;
constexpr int kDraftWarps = kDraftThreads / 32;
constexpr int kDraftMaxTopK = 32;
constexpr int kDraftMaxNodes = 256;
constexpr unsigned kWholeWarp = 0xffffffffu;
constexpr float kNoCandidate = 1.0f;  // where a list of log-probs, none above 0, has ended

__device__ __forceinline__ uint32_t warp_max(uint32_t x) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(kWholeWarp, x);
#else
  for (int step = 16; step > 0; step >>= 1) x = max(x, __shfl_xor_sync(kWholeWarp, x, step));
  return x;
#endif
}

__device__ __forceinline__ uint32_t warp_min(uint32_t x) { return ~warp_max(~x); }

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(kWholeWarp, x, step);
  return x;
}

__device__ __forceinline__ uint32_t lanes_below(int lane) { return (1u << lane) - 1; }

// exp(x) for x <= 0 within two units in the last place: one special-function instruction.
__device__ __forceinline__ float fast_exp(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.44269504f));
  return y;
}

// A sum of exponentials relative to `peak`; relative to 0 where the peak is -inf, so that nothing becomes NaN that
// wasn't. NaN and +inf among the terms make the sum NaN.
struct ExpSum {
  float peak;
  float sum;
};

__device__ __forceinline__ float exp_base(float peak) { return peak == -INFINITY ? 0.0f : peak; }

// Partial sums of a warp's lanes, brought to one.
__device__ __forceinline__ ExpSum warp_join(ExpSum part) {
  const float peak = score_of(warp_max(ordered_score(part.peak)));
  return {peak, warp_sum(part.sum * fast_exp(part.peak - exp_base(peak)))};
}

// A lower bound of the top_k-th largest of all lanes' values, given each lane's largest: the smallest of the
// maxima of at least `num_groups` groups of lanes. About top_k * ln(top_k) values reach it when their order is random.
__device__ __forceinline__ uint32_t group_bound(uint32_t lane_max, int num_groups) {
  for (int step = 1; step * 2 * num_groups <= 32; step <<= 1)
    lane_max = max(lane_max, __shfl_xor_sync(kWholeWarp, lane_max, step));
  return warp_min(lane_max);
}

__device__ __forceinline__ int power_of_two_at_least(int x) { return x <= 1 ? 1 : 1 << (32 - __clz(x - 1)); }

constexpr int kMergeBatch = 256;  // keys a warp looks at together
// A merge list: the kept keys, a batch behind them, and room to sort the kept ones into.
constexpr int kMergeCapacity = kMergeBatch + kDraftMaxTopK;
constexpr int kMergeStride = kMergeCapacity + kDraftMaxTopK;

// One warp: the top_k largest of the n <= kMergeCapacity unique keys in `list`, sorted to its front; returns how many.
__device__ __forceinline__ int keep_best(uint64_t* list, int n, int top_k, int lane) {
  for (int i = lane; i < n; i += 32) {
    const uint64_t key = list[i];
    int rank = 0;
    for (int j = 0; j < n; ++j) rank += list[j] > key ? 1 : 0;
    if (rank < top_k) list[kMergeCapacity + rank] = key;
  }
  __syncwarp();
  const int num_kept = min(n, top_k);
  if (lane < num_kept) list[lane] = list[kMergeCapacity + lane];
  __syncwarp();
  return num_kept;
}

// Candidate lists in shared memory. A row has top_k log-probs and two that end it, and there are two rows of ends
// behind the last depth, so that growth never checks a bound.
struct DraftLists {
  float* log_probs;  // [num_depths + 2, stride]
  uint32_t* ids;     // [num_depths, stride]
  int stride;        // top_k + 2
};

// The grown tree in shared memory.
struct DraftNodes {
  float* scores;      // [N]
  uint32_t* parents;  // [N]
  uint32_t* places;   // [N] (depth - 1) << 8 | rank of the node among the candidates of its depth
  uint32_t* masks;    // [N, W]
};

// One node's next offers, in the registers of one lane. Scores are ordered; 0: no offer.
struct DraftOffer {
  uint32_t child;       // the offered child
  uint32_t sibling;     // what is offered once that child is taken
  uint32_t grandchild;  // the offered child's own first offer
  uint32_t place;       // depth of this node << 8 | children taken
};

__device__ __forceinline__ uint32_t offered(float score, float log_prob) {
  return log_prob > 0.0f ? 0 : ordered_score(score + log_prob);
}

__device__ __forceinline__ uint32_t offered_after(uint32_t score, float log_prob) {
  return score == 0 ? 0 : offered(score_of(score), log_prob);
}

// One warp grows the tree; node i's offer lives in slot i / 32 of lane i % 32. Each pick costs one warp-wide maximum,
// a vote and a shuffle: what follows from a pick was computed before it. Returns the number of nodes.
template <int kSlots>
__device__ int grow(const DraftLists& lists, const DraftNodes& nodes, int num_nodes, int mask_words, int top_k,
                    bool& is_truncated) {
  const int lane = threadIdx.x & 31;
  DraftOffer offers[kSlots];
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) offers[slot] = {0, 0, 0, 0};
  if (lane == 0) {
    const float* row = lists.log_probs;
    offers[0].child = offered(0.0f, row[0]);
    offers[0].sibling = offered(0.0f, row[1]);
    offers[0].grandchild = offered_after(offers[0].child, row[lists.stride]);
    nodes.scores[0] = 0.0f;
    nodes.parents[0] = ~0u;
    nodes.places[0] = 0;
  }
  if (lane < mask_words) nodes.masks[lane] = lane == 0 ? 1 : 0;
  __syncwarp();
  int n = 1;
  for (; n < num_nodes; ++n) {
    uint32_t best = offers[0].child;
#pragma unroll
    for (int slot = 1; slot < kSlots; ++slot) best = max(best, offers[slot].child);
    best = warp_max(best);
    if (best == 0) break;
    // Ties go to the lowest parent: the first slot, then the first lane.
    int parent_slot = 0;
    uint32_t voters = 0;
#pragma unroll
    for (int slot = kSlots - 1; slot >= 0; --slot) {
      const uint32_t votes = __ballot_sync(kWholeWarp, offers[slot].child == best);
      if (votes) {
        voters = votes;
        parent_slot = slot;
      }
    }
    const int parent_lane = __ffs(static_cast<int>(voters)) - 1;
    const int parent = parent_slot * 32 + parent_lane;
    uint32_t place = offers[0].place, grandchild = offers[0].grandchild;
#pragma unroll
    for (int slot = 1; slot < kSlots; ++slot)
      if (parent_slot == slot) {
        place = offers[slot].place;
        grandchild = offers[slot].grandchild;
      }
    grandchild = __shfl_sync(kWholeWarp, grandchild, parent_lane);
    place = __shfl_sync(kWholeWarp, place, parent_lane);
    const float score = score_of(best), parent_score = nodes.scores[parent];
    const float* row = lists.log_probs + (place >> 8) * lists.stride;
    const float after_sibling = row[(place & 0xff) + 2];
    const float first_below = row[lists.stride], second_below = row[lists.stride + 1];
    const float first_two_below = row[2 * lists.stride];
    const int new_lane = n & 31, new_slot = n >> 5;
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      DraftOffer& offer = offers[slot];
      if (lane == parent_lane && slot == parent_slot) {
        offer.child = offer.sibling;
        offer.sibling = offered(parent_score, after_sibling);
        offer.grandchild = offered_after(offer.child, first_below);
        offer.place += 1;
      }
      if (lane == new_lane && slot == new_slot) {
        offer.child = grandchild;
        offer.sibling = offered(score, second_below);
        offer.grandchild = offered_after(grandchild, first_two_below);
        offer.place = ((place >> 8) + 1) << 8;
      }
    }
    if (lane < mask_words)
      nodes.masks[n * mask_words + lane] =
          nodes.masks[parent * mask_words + lane] | (lane == new_slot ? 1u << new_lane : 0);
    if (lane == 0) {
      nodes.scores[n] = score;
      nodes.parents[n] = static_cast<uint32_t>(parent);
      nodes.places[n] = place;
    }
    __syncwarp();
  }
  bool all_taken = false;
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) all_taken |= static_cast<int>(offers[slot].place & 0xff) == top_k;
  is_truncated = __any_sync(kWholeWarp, all_taken);
  return n;
}

// Bytes of 0 or 1 from the low four bits.
__device__ __forceinline__ uint32_t spread4(uint32_t bits) { return ((bits & 15) * 0x00204081u) & 0x01010101u; }

// The mask of node i; padding nodes have none, or themselves.
__device__ __forceinline__ uint32_t mask_word(const DraftNodes& nodes, const DraftSizes& sizes, int valid, int i,
                                              int word) {
  if (i < valid) return nodes.masks[i * sizes.mask_words() + word];
  return sizes.self_padding && word == i / 32 ? 1u << (i % 32) : 0;
}

// The whole block writes the masks of one batch row.
__device__ __forceinline__ void write_masks(const DraftSizes& sizes, const DraftOutputs& out, int64_t batch,
                                            const DraftNodes& nodes, int valid) {
  const int size = sizes.num_nodes, words = sizes.mask_words();
  int32_t* packed = out.packed_ancestor_mask + batch * size * words;
  for (int at = threadIdx.x; at < size * words; at += kDraftThreads)
    packed[at] = static_cast<int32_t>(mask_word(nodes, sizes, valid, at / words, at % words));
  int8_t* bytes = out.ancestor_mask + batch * size * size;
  if (size % 16 == 0 && reinterpret_cast<uintptr_t>(out.ancestor_mask) % 16 == 0) {
    const int pieces = size / 16;
    for (int at = threadIdx.x; at < size * pieces; at += kDraftThreads) {
      const int i = at / pieces, piece = at % pieces;
      const uint32_t bits = mask_word(nodes, sizes, valid, i, piece / 2) >> (piece % 2 * 16);
      reinterpret_cast<uint4*>(bytes)[at] =
          make_uint4(spread4(bits), spread4(bits >> 4), spread4(bits >> 8), spread4(bits >> 12));
    }
  } else {
    for (int at = threadIdx.x; at < size * size; at += kDraftThreads) {
      const int key = at % size;
      bytes[at] = static_cast<int8_t>((mask_word(nodes, sizes, valid, at / size, key / 32) >> (key % 32)) & 1);
    }
  }
}

}  // namespace flashtrie
#endif
