// The best tree from candidate lists, node by node, by one warp (nvcc only): for trees that go deep, where a pick costs less
// than its share of a level.
#pragma once
#include "draft_grow.cuh"

#if defined(__CUDACC__) || defined(FT_EMULATION)

namespace flashtrie {

// The next offers of one node.
struct alignas(16) DraftOffer {
  float sibling;     // what the node offers once the child it offers is taken
  float grandchild;  // the offered child's own first offer
  uint32_t places;   // where the lists have its own first child's first child << 16 | the child it offers
  float cost;        // of the node
};

// Costs are not negative, so that their bits compare like themselves; node i's offered cost lives in slot i / 32 of lane i %
// 32, everything else about its offers in shared memory. A pick costs a warp-wide minimum, the lowest parent that offers it,
// and one read; what follows from a pick is computed in the shadow of the next one's minimum. A warp alone takes some five cycles an instruction, so there are few, and no branches:
// lists have ends wherever a read may get to. Leaves keys (their ranks are 0) and places as TreeGrowth does; returns the
// number of nodes.
template <int kSlots>
__device__ __forceinline__ int pick_nodes(const DraftLists& lists, GrowShared& shared, int num_nodes) {
  const uint32_t lane = threadIdx.x & 31, stride = static_cast<uint32_t>(lists.stride);
  DraftOffer* offers = reinterpret_cast<DraftOffer*>(shared.list);
  uint32_t offered[kSlots];
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) offered[slot] = ~0u;
  if (lane == 0) offered[0] = __float_as_uint(lists.costs[0]);
  // Of the last pick, even lanes keep the parent's next offers and odd lanes the new node's; at first both the root's.
  uint32_t owner = 0, child = 0, below = stride;
  float cost = 0.0f, offer = lists.costs[0], next = lists.costs[1], next_below = lists.costs[stride];
  uint32_t node = 1;
#pragma unroll 1
  while (true) {
    uint32_t best = offered[0];
#pragma unroll
    for (int slot = 1; slot < kSlots; ++slot) best = min(best, offered[slot]);
    best = warp_min(best);
    __syncwarp();  // all lanes have read what this overwrites
    if (lane < 2) offers[owner] = {cost + next, offer + next_below, below << 16 | child, cost};
    uint32_t parent = ~0u;
#pragma unroll
    for (int slot = kSlots - 1; slot >= 0; --slot) parent = offered[slot] == best ? slot * 32 + lane : parent;
    parent = kSlots == 1 ? __ffs(__ballot_sync(kWholeWarp, parent == lane)) - 1 : warp_min(parent);
    if (best >= kNoCost || node == static_cast<uint32_t>(num_nodes)) break;
    __syncwarp();
    const DraftOffer taken = offers[parent];
    const uint32_t taken_child = taken.places & 0xffff, taken_below = taken.places >> 16;
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      offered[slot] = slot * 32 + lane == parent ? __float_as_uint(taken.sibling) : offered[slot];
      offered[slot] = slot * 32 + lane == node ? __float_as_uint(taken.grandchild) : offered[slot];
    }
    const bool is_new = lane & 1;
    owner = is_new ? node : parent;
    child = is_new ? taken_below : taken_child + 1;
    below = is_new ? taken_below + stride : taken_below;
    cost = is_new ? __uint_as_float(best) : taken.cost;
    offer = is_new ? taken.grandchild : taken.sibling;
    next = lists.costs[child + 1];
    next_below = lists.costs[below];
    if (lane == 0) {
      shared.keys[node] = cost_key(best, parent, 0);
      shared.places[node] = taken_child;
    }
    ++node;
  }
  return static_cast<int>(node);
}

}  // namespace flashtrie
#endif
