// The best tree from candidate lists where it has two levels at most, by a whole block in one round (nvcc only).
//
// A drafter that is not sure spreads its tree over many children of few nodes. Then all children and grandchildren of the root
// find their places by counting who comes before them; the N - 1 first are the tree if the best node of a third level comes
// after them.
#pragma once
#include "draft_pick.cuh"

#if defined(__CUDACC__) || defined(FT_EMULATION)

namespace flashtrie {

struct FlatShared {
  alignas(16) uint64_t keys[kDraftThreads];
  uint32_t index_of[kDraftThreads];  // of a child of the root, in the tree's order
  int is_flat;
};

// Whether it may be tried.
__device__ __forceinline__ bool may_be_flat(int top_k, int num_nodes) {
  const int num_candidates = top_k * (top_k + 1);
  return num_candidates <= kDraftThreads && num_candidates >= num_nodes - 1 && num_nodes > 1;
}

// False if the tree is not flat. The whole block, after a barrier; ends with one.
__device__ __forceinline__ bool grow_flat(const DraftLists& lists, TreeShared& tree, FlatShared& flat, int num_nodes) {
  const int top_k = lists.top_k, num_candidates = top_k * (top_k + 1);
  // Two lanes count for a candidate if there are threads for it.
  const int shift = 2 * num_candidates <= kDraftThreads ? 1 : 0, own = threadIdx.x & ((1 << shift) - 1);
  const int at = static_cast<int>(threadIdx.x) >> shift;
  const bool is_child = at < top_k, is_candidate = at < num_candidates;
  const int child = is_child ? at : min((at - top_k) / top_k, top_k - 1), rank = is_child ? at : at - top_k - child * top_k;
  const uint32_t place = is_child ? rank : lists.stride + min(rank, top_k);
  const float cost = is_child ? lists.costs[place] : lists.costs[child] + lists.costs[place];
  const float deep = lists.costs[0] + lists.costs[lists.stride] + lists.costs[2 * lists.stride];
  // By cost, then by the parent, which is the root or a child in the order of children, then by rank.
  const uint32_t bits = __float_as_uint(cost);
  const uint64_t key = static_cast<uint64_t>(bits) << 32 | (is_child ? 0 : child + 1) << 8 | rank;
  if (is_candidate && own == 0) flat.keys[at] = key;
  __syncthreads();
  const ulonglong2* pairs = reinterpret_cast<const ulonglong2*>(flat.keys);
  int before = 0, more = 0;
#pragma unroll 4
  for (int pair = own; pair < num_candidates / 2; pair += 1 << shift) {
    before += pairs[pair].x < key ? 1 : 0;
    more += pairs[pair].y < key ? 1 : 0;
  }
  before += more;
  if (shift == 1) before += __shfl_xor_sync(kWholeWarp, before, 1);
  const bool is_one = is_candidate && own == 0, is_in = is_one && bits < kNoCost && before < num_nodes - 1;
  if (is_one && is_child) flat.index_of[at] = before + 1;
  if (is_one && before == num_nodes - 2) flat.is_flat = !(deep < INFINITY) || cost < deep;
  const int size = 1 + __syncthreads_count(is_in);
  if (!flat.is_flat) return false;
  if (is_in) {
    const uint32_t index = before + 1, parent = is_child ? 0 : flat.index_of[child];
    tree.nodes[index] = {parent, place, cost, 0.0f};
#pragma unroll 1
    for (uint32_t word = 0; word < static_cast<uint32_t>(num_nodes + 31) / 32; ++word)
      tree.masks[index][word] = (word == 0 ? 1 : 0) | (parent >> 5 == word ? 1u << (parent & 31) : 0) |
                                (index >> 5 == word ? 1u << (index & 31) : 0);
  }
  if (threadIdx.x < 32) tree.masks[0][threadIdx.x] = threadIdx.x == 0 ? 1 : 0;
  if (threadIdx.x == 0) tree.size = size;
  const bool is_full = __syncthreads_or(is_in && rank == top_k - 1);
  if (threadIdx.x == 0) tree.is_full = is_full;  // who asks for it
  return true;
}

}  // namespace flashtrie
#endif
