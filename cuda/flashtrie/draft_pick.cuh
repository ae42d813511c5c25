// The best tree from candidate lists, node by node, by one warp (nvcc only).
//
// Every node offers the best of its children that is not in the tree; the best offer is taken, of equal ones that of the
// lowest parent. So a tree takes one short round a node, whatever its shape.
#pragma once
#include "draft_merge.cuh"

#if defined(__CUDACC__) || defined(FT_EMULATION)

namespace flashtrie {

// A node of the tree as it was picked.
struct alignas(16) PickedNode {
  uint32_t parent;
  uint32_t place;  // where the lists have it
  float cost;
  uint32_t padding;
};

struct TreeShared {
  PickedNode nodes[kDraftMaxNodes];
  uint32_t masks[kDraftMaxNodes * kDraftMaxNodes / 32];  // rows of picked nodes
  int size;
  int is_full;  // some node has all its listed children in the tree
  int is_bad;
};

// Node i's offer lives in registers of lane i % 32, slot i / 32: the child's cost, and what follows if it is taken, the next
// sibling's cost and the child's own first offer. A round is the warp's minimum, the lane that has it, and one exchange; what
// the lists say of the round after is read meanwhile. Costs are not negative, so that their bits compare like themselves;
// lists have ends wherever a read may get to, so that there are no branches.
template <int kSlots>
class TreePick {
 public:
  __device__ TreePick(const DraftLists& lists, TreeShared& tree, int num_nodes)
      : lists_(lists), tree_(tree), num_nodes_(num_nodes), lane_(threadIdx.x & 31) {}

  __device__ void run() {
    const uint32_t stride = static_cast<uint32_t>(lists_.stride), log2_stride = 31 - __clz(lists_.stride);
    const uint32_t num_words = (num_nodes_ + 31) / 32;
    start(stride);
    bool is_full = false;
    uint32_t node = 1;
#pragma unroll 1
    for (; node < static_cast<uint32_t>(num_nodes_); ++node) {
      uint32_t offer = offered_[0], slot = 0;
#pragma unroll
      for (uint32_t i = 1; i < kSlots; ++i) {
        slot = offered_[i] < offer ? i : slot;
        offer = min(offer, offered_[i]);
      }
      const uint32_t best = warp_min(offer);
      float sibling = siblings_[0], grandchild = grandchildren_[0], cost = costs_[0];
      uint32_t child = children_[0];
#pragma unroll
      for (uint32_t i = 1; i < kSlots; ++i) {
        sibling = slot == i ? siblings_[i] : sibling;
        grandchild = slot == i ? grandchildren_[i] : grandchild;
        cost = slot == i ? costs_[i] : cost;
        child = slot == i ? children_[i] : child;
      }
      if (best >= kNoCost) break;
      const uint32_t votes = __ballot_sync(kWholeWarp, offer == best);
      uint32_t winner = __ffs(votes) - 1;
      if (kSlots > 1 && (votes & (votes - 1)) != 0)
        winner = warp_min(offer == best ? slot << 5 | lane_ : ~0u) & 31;
      const uint32_t taken = __shfl_sync(kWholeWarp, slot << 24 | child, winner);
      const float first_offer = __shfl_sync(kWholeWarp, grandchild, winner);
      const uint32_t place = taken & 0xffffff, parent = (taken >> 24) << 5 | winner;
      const uint32_t below = ((place >> log2_stride) + 1) << log2_stride;
      const float after = lists_.costs[place + 2], first = lists_.costs[below];
      const float second = lists_.costs[below + 1], deeper = lists_.costs[below + stride];
      const float taken_cost = __uint_as_float(best);
#pragma unroll
      for (uint32_t i = 0; i < kSlots; ++i) {
        if (lane_ == winner && slot == i) {
          offered_[i] = __float_as_uint(sibling);
          children_[i] = place + 1;
          siblings_[i] = cost + after;
          grandchildren_[i] = sibling + first;
        }
        if ((i << 5 | lane_) == node) {
          offered_[i] = __float_as_uint(first_offer);
          children_[i] = below;
          costs_[i] = taken_cost;
          siblings_[i] = taken_cost + second;
          grandchildren_[i] = first_offer + deeper;
        }
      }
      if (lane_ == 0) tree_.nodes[node] = {parent, place, taken_cost, 0};
      if (lane_ < num_words)
        tree_.masks[node * num_words + lane_] =
            tree_.masks[parent * num_words + lane_] | (lane_ == node >> 5 ? 1u << (node & 31) : 0u);
      is_full |= (place & (stride - 1)) == static_cast<uint32_t>(lists_.top_k) - 1;
    }
    if (lane_ == 0) {
      tree_.size = static_cast<int>(node);
      tree_.is_full = is_full;
    }
  }

 private:
  __device__ void start(uint32_t stride) {
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      offered_[i] = ~0u;
      children_[i] = 0;
      costs_[i] = siblings_[i] = grandchildren_[i] = 0.0f;
    }
    if (lane_ == 0) {
      offered_[0] = __float_as_uint(lists_.costs[0]);
      siblings_[0] = lists_.costs[1];
      grandchildren_[0] = lists_.costs[0] + lists_.costs[stride];
    }
    const uint32_t num_words = (num_nodes_ + 31) / 32;
    if (lane_ < num_words) tree_.masks[lane_] = lane_ == 0 ? 1 : 0;
  }

  const DraftLists& lists_;
  TreeShared& tree_;
  const int num_nodes_;
  const uint32_t lane_;
  uint32_t offered_[kSlots];   // bits of the offered child's cost
  uint32_t children_[kSlots];  // its place in the lists
  float costs_[kSlots];        // of the node
  float siblings_[kSlots], grandchildren_[kSlots];
};

}  // namespace flashtrie
#endif
