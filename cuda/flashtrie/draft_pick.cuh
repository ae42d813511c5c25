// The best tree of at most 64 nodes from candidate lists, node by node, by one warp (nvcc only).
//
// Every node offers the best of its children that is not in the tree; the best offer is taken, of equal ones that of the
// lowest parent. So a tree takes one short round a node, whatever its shape.
#pragma once
#include "draft_levels.cuh"

#if defined(__CUDACC__) || defined(FT_EMULATION)

namespace flashtrie {

// Node i's offer lives in registers of lane i % 32, slot i / 32: the child's cost, and what follows if it is taken, the next
// sibling's cost and the child's own first offer. A round is the warp's minimum and the lowest lane that has it. That lane goes on at once with
// both offers that follow, its own and the new node's; the new node's lane takes over from it while the next minimum is found,
// and so does what the lists say of the offers after those.
// Costs are not negative, so that their bits compare like themselves; lists have ends wherever a read may get to, so that
// there are no branches.
template <int kSlots>
class TreePick {
 public:
  __device__ TreePick(const DraftLists& lists, TreeShared& tree, int num_nodes)
      : costs_of_(lists.costs),
        nodes_(tree.nodes[0]),
        num_nodes_(static_cast<uint32_t>(num_nodes)),
        stride_(static_cast<uint32_t>(lists.stride)),
        log2_stride_(31 - __clz(lists.stride)),
        lane_(threadIdx.x & 31) {}

  // Leaves the nodes in the first buffer. Returns how many there are.
  __device__ int run() {
    start();
    uint32_t node = 0, pending = ~0u;
#pragma unroll 1
    while (true) {
      uint32_t offer = offered_[0], slot = 0;
#pragma unroll
      for (uint32_t i = 1; i < kSlots; ++i) {
        slot = offered_[i] < offer ? i : slot;
        offer = min(offer, offered_[i]);
      }
      const uint32_t best = early_min(min(offer, pending));
      const TreeNode last = read_late(nodes_ + node);
      const Behind behind = look_behind(last);
      join_in(node, last, offer, slot);
      const uint32_t votes = __ballot_sync(kWholeWarp, offer == best);
      settle(node, last, behind);
      ++node;
      if (best >= kNoCost || node == num_nodes_) break;
      float sibling = siblings_[0], grandchild = grandchildren_[0];
      uint32_t child = children_[0];
#pragma unroll
      for (uint32_t i = 1; i < kSlots; ++i) {
        sibling = slot == i ? siblings_[i] : sibling;
        grandchild = slot == i ? grandchildren_[i] : grandchild;
        child = slot == i ? children_[i] : child;
      }
      bool wins = offer == best && (votes & lanes_below(lane_)) == 0;
      if (kSlots > 1 && (votes & (votes - 1)) != 0) {  // a tie goes to the lowest node
        const uint32_t mine = offer == best ? slot << 5 | lane_ : ~0u;
        wins = warp_min(mine) == mine;
      }
      pending = wins ? __float_as_uint(grandchild) : ~0u;
#pragma unroll
      for (uint32_t i = 0; i < kSlots; ++i) {
        const bool is_parent = wins && slot == i;
        offered_[i] = is_parent ? __float_as_uint(sibling) : offered_[i];
        children_[i] += is_parent ? 1 : 0;
      }
      if (wins) nodes_[node] = {slot << 5 | lane_, child, __uint_as_float(best), grandchild};
      __syncwarp();
    }
    return static_cast<int>(node);
  }

 private:
  // What the lists say of the offers behind a pick.
  struct Behind {
    float after;                  // its second next sibling
    float first, second, deeper;  // the first two children of a node of its depth, and the first child of such a child
  };

  // warp_min and a read from shared memory that stay in this order: what a read is for is not to hold up the minimum.
  __device__ static uint32_t early_min(uint32_t x) {
#if __CUDA_ARCH__ >= 800
    uint32_t least;
    asm volatile("redux.sync.min.u32 %0, %1, 0xffffffff;" : "=r"(least) : "r"(x));
    return least;
#else
    return warp_min(x);
#endif
  }

  __device__ static TreeNode read_late(const TreeNode* node) {
#if defined(__CUDA_ARCH__)
    TreeNode found;
    const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(node));
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(found.parent), "=r"(found.place), "=f"(found.cost), "=f"(found.first_offer)
                 : "r"(at)
                 : "memory");
    return found;
#else
    return *node;
#endif
  }

  __device__ void start() {
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      offered_[i] = ~0u;
      children_[i] = 0;
      costs_[i] = siblings_[i] = grandchildren_[i] = 0.0f;
    }
    // The root, as if it had just been picked from a row in front of the first.
    if (lane_ == 0) {
      offered_[0] = __float_as_uint(costs_of_[0]);
      nodes_[0] = {0, 0u - stride_, 0.0f, costs_of_[0]};
    }
    __syncwarp();
  }

  // Where the lists have the first child of a node.
  __device__ uint32_t below(uint32_t place) const { return ((place >> log2_stride_) + 1) << log2_stride_; }

  __device__ Behind look_behind(const TreeNode& last) const {
    const float* row = costs_of_ + below(last.place);
    return {costs_of_[max(static_cast<int>(last.place) + 2, 0)], row[0], row[1], row[stride_]};
  }

  // The lane of the last pick, `node`, offers its first child.
  __device__ void join_in(uint32_t node, const TreeNode& last, uint32_t& offer, uint32_t& slot) {
    const uint32_t first_offer = __float_as_uint(last.first_offer);
#pragma unroll
    for (uint32_t i = 0; i < kSlots; ++i) {
      const bool is_node = (i << 5 | lane_) == node;
      offered_[i] = is_node ? first_offer : offered_[i];
      children_[i] = is_node ? below(last.place) : children_[i];
    }
    const bool is_better = lane_ == (node & 31) && first_offer < offer;
    offer = is_better ? first_offer : offer;
    slot = is_better ? node >> 5 : slot;
  }

  // What follows from the last pick, `node`, for its parent's offers and its own.
  __device__ void settle(uint32_t node, const TreeNode& last, const Behind& behind) {
#pragma unroll
    for (uint32_t i = 0; i < kSlots; ++i) {
      const bool is_node = (i << 5 | lane_) == node, is_parent = (i << 5 | lane_) == last.parent;
      const float sibling = costs_[i] + behind.after, below = __uint_as_float(offered_[i]) + behind.first;
      siblings_[i] = is_node ? last.cost + behind.second : is_parent ? sibling : siblings_[i];
      grandchildren_[i] = is_node ? last.first_offer + behind.deeper : is_parent ? below : grandchildren_[i];
      costs_[i] = is_node ? last.cost : costs_[i];
    }
  }

  const float* costs_of_;  // of the lists
  TreeNode* nodes_;
  const uint32_t num_nodes_, stride_, log2_stride_, lane_;
  uint32_t offered_[kSlots];   // bits of the offered child's cost
  uint32_t children_[kSlots];  // its place in the lists
  float costs_[kSlots];        // of the node
  float siblings_[kSlots], grandchildren_[kSlots];
};

}  // namespace flashtrie
#endif
