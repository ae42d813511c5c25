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
  uint32_t masks[kDraftMaxNodes][32];  // rows of picked nodes, a word a lane
  int size;
  int is_full;  // some node has all its listed children in the tree
  int is_bad;
};

// Node i's offer lives in registers of lane i % 32, slot i / 32: the child's cost, and what follows if it is taken, the next
// sibling's cost and the child's own first offer. A round is the warp's minimum, the lane that has it, and one exchange.
// Rounds overlap: what the lists say of the last pick, which no offer needs yet, arrives while the next minimum is found.
// Costs are not negative, so that their bits compare like themselves; lists have ends wherever a read may get to, so that
// there are no branches.
template <int kSlots>
class TreePick {
 public:
  __device__ TreePick(const DraftLists& lists, TreeShared& tree, int num_nodes)
      : lists_(lists),
        tree_(tree),
        num_nodes_(static_cast<uint32_t>(num_nodes)),
        lane_(threadIdx.x & 31) {}

  __device__ void run() {
    const uint32_t stride = static_cast<uint32_t>(lists_.stride), log2_stride = 31 - __clz(lists_.stride);
    start(stride);
    uint32_t node = 1, last_rank = 0;
#pragma unroll 1
    while (true) {
      uint32_t offer = offered_[0], slot = 0;
#pragma unroll
      for (uint32_t i = 1; i < kSlots; ++i) {
        slot = offered_[i] < offer ? i : slot;
        offer = min(offer, offered_[i]);
      }
      const uint32_t best = warp_min(offer);
      const uint32_t votes = __ballot_sync(kWholeWarp, offer == best);
      settle(node - 1);
      if (best >= kNoCost || node == num_nodes_) break;
      float sibling = siblings_[0], grandchild = grandchildren_[0];
      uint32_t child = children_[0];
#pragma unroll
      for (uint32_t i = 1; i < kSlots; ++i) {
        sibling = slot == i ? siblings_[i] : sibling;
        grandchild = slot == i ? grandchildren_[i] : grandchild;
        child = slot == i ? children_[i] : child;
      }
      uint32_t winner = __ffs(votes) - 1;
      if (kSlots > 1 && (votes & (votes - 1)) != 0) winner = warp_min(offer == best ? slot << 5 | lane_ : ~0u) & 31;
      // The next round waits for the offer, not for the place.
      const float first_offer = __uint_as_float(lane_word(__float_as_uint(grandchild), winner));
      const uint32_t taken = lane_word(kSlots > 1 ? slot << 24 | child : child, winner);
      const uint32_t place = kSlots > 1 ? taken & 0xffffff : taken;
      const uint32_t parent = kSlots > 1 ? (taken >> 24) << 5 | winner : winner;
      const uint32_t below = ((place >> log2_stride) + 1) << log2_stride;
#pragma unroll
      for (uint32_t i = 0; i < kSlots; ++i) {
        const bool is_parent = lane_ == winner && slot == i, is_node = (i << 5 | lane_) == node;
        offered_[i] = is_parent ? __float_as_uint(sibling) : is_node ? __float_as_uint(first_offer) : offered_[i];
        children_[i] = is_parent ? place + 1 : is_node ? below : children_[i];
      }
      last_ = {parent, __uint_as_float(best), first_offer, lists_.costs[place + 2], lists_.costs[below],
               lists_.costs[below + 1], lists_.costs[below + stride],
               tree_.masks[parent][lane_]};
      if (lane_ == 0) tree_.nodes[node] = {parent, place, __uint_as_float(best), 0};
      last_rank = max(last_rank, place & (stride - 1));
      ++node;
    }
    if (lane_ == 0) {
      tree_.size = static_cast<int>(node);
      tree_.is_full = node > 1 && last_rank == static_cast<uint32_t>(lists_.top_k) - 1;
    }
  }

 private:
  // A pick, as far as its offers are not settled.
  struct Pick {
    uint32_t parent;
    float cost, first_offer;       // of the node
    float after;                   // of the lists: behind its next sibling
    float first, second, deeper;   // the two first children of a node of its depth, and the first child of such a child
    uint32_t parent_mask;          // a word a lane
  };

  // The root, as if it had just been picked.
  __device__ void start(uint32_t stride) {
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      offered_[i] = ~0u;
      children_[i] = 0;
      costs_[i] = siblings_[i] = grandchildren_[i] = 0.0f;
    }
    const float* costs = lists_.costs;
    if (lane_ == 0) offered_[0] = __float_as_uint(costs[0]);
    last_ = {~0u, 0.0f, costs[0], 0.0f, 0.0f, costs[1], costs[stride], 0};
  }

  // What follows from the last pick, `node`.
  __device__ void settle(uint32_t node) {
#pragma unroll
    for (uint32_t i = 0; i < kSlots; ++i) {
      const bool is_parent = (i << 5 | lane_) == last_.parent, is_node = (i << 5 | lane_) == node;
      const float after = costs_[i] + last_.after, below = __uint_as_float(offered_[i]) + last_.first;
      costs_[i] = is_node ? last_.cost : costs_[i];
      siblings_[i] = is_parent ? after : is_node ? last_.cost + last_.second : siblings_[i];
      grandchildren_[i] = is_parent ? below : is_node ? last_.first_offer + last_.deeper : grandchildren_[i];
    }
    tree_.masks[node][lane_] = last_.parent_mask | (lane_ == node >> 5 ? 1u << (node & 31) : 0);
  }

  const DraftLists& lists_;
  TreeShared& tree_;
  const uint32_t num_nodes_, lane_;
  uint32_t offered_[kSlots];   // bits of the offered child's cost
  uint32_t children_[kSlots];  // its place in the lists
  float costs_[kSlots];        // of the node
  float siblings_[kSlots], grandchildren_[kSlots];
  Pick last_;
};

}  // namespace flashtrie
#endif
