// The best tree from candidate lists, level by level, by a whole block (nvcc only).
//
// Of the nodes down to some depth the N - 1 best are known, in order; the children of the deepest of them are merged in, and
// so on, until no child can come before the last. A child finds its place among the known by a search, and there are few
// between two of those. Nodes that drop out are never needed again, since children are no better than their parents.
//
// Order: (cost, parent's index, rank). Among equals a parent's index in the tree so far is as good as in the final one, since
// the order of what stays is the same. The q-th of the parents is preceded by those before it, and its child of rank r by
// (q + 1) (r + 1) - 1 others of its level; so (q + 1) (r + 2) < N for all children that matter, few enough for each thread
// to have some of its own.
#pragma once
#include "draft_merge.cuh"

#if defined(__CUDACC__) || defined(FT_EMULATION)

namespace flashtrie {

// A node of the tree.
struct alignas(16) TreeNode {
  uint32_t parent;
  uint32_t place;     // where the lists have it
  float cost;
  float first_offer;  // the cost of its own first child, where nodes are picked one by one
};

constexpr int kMaskStride = kDraftMaxNodes / 32 + 1;  // odd, so that rows begin in all banks
constexpr int kMostPicked = 32;                       // nodes of a tree that may be picked: one a lane
constexpr int kManyLevels = 6;                        // take longer than picking 32 nodes
constexpr int kMostChildren = 800;                    // sum of (N - 1) / (rank + 2) over all ranks

struct TreeShared {
  TreeNode nodes[2][kDraftMaxNodes];  // before a level and after it
  alignas(16) float costs[2][kDraftMaxNodes];  // and then infinite
  alignas(16) uint32_t counts[kDraftMaxNodes];  // of children behind each node; zero between levels
  uint32_t firsts[kDraftMaxNodes + 1];          // of children behind nodes before each
  uint32_t parents[kDraftMaxNodes];             // nodes of the last level
  int size;                                     // of a tree that is picked
  union {
    struct {
      uint64_t keys[kMostChildren];                    // of children, by number
      alignas(16) uint64_t behind[kMostChildren + 2];  // the same, by the nodes that they come after
      uint32_t afters[kMostChildren];                  // the node that it comes after, and which of those behind that it is
    };
    uint32_t masks[kDraftMaxNodes][kMaskStride];  // of the whole tree
  };
};

// A child's number among those that may matter: which parent's it is, and its rank; the same in every level.
struct ChildNumbers {
  static constexpr int kRankBits = 5;
  uint16_t of[kMostChildren];
  int count;
};

static_assert(kDraftMaxTopK <= 1 << ChildNumbers::kRankBits, "a rank and a parent in one word");

// The whole block; a barrier must follow.
__device__ __forceinline__ void number_children(ChildNumbers& numbers, int num_nodes, int top_k) {
  int before = 0;
#pragma unroll 1
  for (int rank = 0; rank < top_k; ++rank) {
    const int count = (num_nodes - 1) / (rank + 2);
    for (int at = threadIdx.x; at < count; at += kDraftThreads)
      numbers.of[before + at] = static_cast<uint16_t>(at << ChildNumbers::kRankBits | rank);
    before += count;
  }
  if (threadIdx.x == 0) numbers.count = before;
}

// A tree's size; `nodes` are the root and those that follow.
struct Tree {
  const TreeNode* nodes;
  int size;
};

class TreeLevels {
 public:
  __device__ TreeLevels(const DraftLists& lists, const ChildNumbers& numbers, TreeShared& shared, int num_nodes)
      : lists_(lists),
        numbers_(numbers),
        shared_(shared),
        num_nodes_(num_nodes),
        num_children_(numbers.count),
        thread_(static_cast<int>(threadIdx.x)) {}

  // The whole block, after a barrier; ends with one. A tree of no size: it is small and has many levels, better picked.
  __device__ Tree grow(int num_depths) {
    start();
    float deepest = lists_.costs[0];  // the best cost of the last level
#pragma unroll 1
    for (int depth = 1; depth < num_depths && num_parents_ > 0; ++depth) {
      if (depth == 2 && num_nodes_ <= kMostPicked && goes_deep(deepest, num_depths)) return {nullptr, 0};
      deepest += lists_.costs[depth * lists_.stride];
      if (!may_enter(deepest)) break;
      add_level(depth);
    }
    return {shared_.nodes[now_], size_};
  }

 private:
  // The root and its children; `parents` are the children.
  __device__ void start() {
    const float cost = thread_ == 0 ? 0.0f : lists_.costs[min(thread_ - 1, lists_.stride - 1)];
    const bool is_node = thread_ == 0 || (thread_ <= lists_.top_k && thread_ < num_nodes_ && is_cost(cost));
    shared_.costs[0][thread_] = INFINITY;
    if (is_node) put(0, thread_, {0, thread_ == 0 ? 0u - lists_.stride : thread_ - 1u, cost, 0.0f});
    if (is_node && thread_ > 0) shared_.parents[thread_ - 1] = thread_;
    shared_.counts[thread_] = 0;
    size_ = __syncthreads_count(is_node);
    num_parents_ = size_ - 1;
    now_ = 0;
  }

  // Whether a level whose best cost this is may have a node in the tree.
  __device__ bool may_enter(float cost) const {
    return is_cost(cost) && (size_ < num_nodes_ || cost <= shared_.costs[now_][size_ - 1]);
  }

  // Whether, by what is known of two levels, the tree may have so many that picking its nodes is faster.
  __device__ bool goes_deep(float deepest, int num_depths) const {
    if (num_depths < kManyLevels) return false;
#pragma unroll
    for (int depth = 2; depth < kManyLevels; ++depth) deepest += lists_.costs[depth * lists_.stride];
    return may_enter(deepest);
  }

  // Merges in the children of the last level, which is `depth`.
  __device__ void add_level(int depth) {
    const float* costs = lists_.costs + depth * lists_.stride;
    const TreeNode* nodes = shared_.nodes[now_];
    shared_.costs[1 - now_][thread_] = INFINITY;
#pragma unroll 1
    for (int at = thread_; at < num_children_; at += kDraftThreads) {
      const int number = numbers_.of[at] >> ChildNumbers::kRankBits, rank = numbers_.of[at] & (kDraftMaxTopK - 1);
      shared_.afters[at] = kNoNode;
      if (number >= num_parents_) continue;
      const uint32_t parent = shared_.parents[number];
      const float cost = nodes[parent].cost + costs[rank];
      const int after = find(cost, parent);
      if (!is_cost(cost) || after + (number + 1) * (rank + 1) >= num_nodes_) continue;
      shared_.keys[at] = static_cast<uint64_t>(__float_as_uint(cost)) << 32 | parent << 8 | rank;
      shared_.afters[at] = after << 16 | atomicAdd(&shared_.counts[after], 1u);
    }
    __syncthreads();
    if (thread_ < 32) sum_counts();
    __syncthreads();
    shared_.counts[thread_] = 0;
    if (thread_ == 0) shared_.behind[shared_.firsts[kDraftMaxNodes]] = ~uint64_t(0);
#pragma unroll 1
    for (int at = thread_; at < num_children_; at += kDraftThreads) {
      const uint32_t after = shared_.afters[at];
      if (after != kNoNode) shared_.behind[shared_.firsts[after >> 16] + (after & 0xffff)] = shared_.keys[at];
    }
    const int next = 1 - now_, index = thread_ + static_cast<int>(shared_.firsts[thread_]);
    const bool stays = thread_ < size_ && index < num_nodes_;
    if (stays) put(next, index, moved(nodes[thread_]));
    const int num_staying = __syncthreads_count(stays);
#pragma unroll 1
    for (int at = thread_; at < num_children_; at += kDraftThreads)
      if (shared_.afters[at] != kNoNode) put_child(next, depth, shared_.afters[at] >> 16, shared_.keys[at]);
    size_ = min(num_nodes_, size_ + static_cast<int>(shared_.firsts[kDraftMaxNodes]));
    num_parents_ = size_ - num_staying;
    now_ = next;
    __syncthreads();
  }

  // A child to its place in the tree, if it has one.
  __device__ void put_child(int buffer, int depth, uint32_t after, uint64_t key) {
    const uint32_t first = shared_.firsts[after], last = shared_.firsts[after + 1];
    if (1 + after + first >= static_cast<uint32_t>(num_nodes_)) return;
    // In pairs: what is before the first comes before the child, what is behind the last doesn't.
    uint32_t order = first & ~1u;
#pragma unroll 4
    for (uint32_t pair = first / 2; pair < (last + 1) / 2; ++pair) {
      const ulonglong2 others = reinterpret_cast<const ulonglong2*>(shared_.behind)[pair];
      order += (others.x < key ? 1 : 0) + (others.y < key ? 1 : 0);
    }
    const uint32_t index = 1 + after + order;
    if (index >= static_cast<uint32_t>(num_nodes_)) return;
    const uint32_t parent = static_cast<uint32_t>(key) >> 8, rank = static_cast<uint32_t>(key) & 0xff;
    put(buffer, index, {parent + shared_.firsts[parent], depth * lists_.stride + rank,
                        __uint_as_float(static_cast<uint32_t>(key >> 32)), 0.0f});
    shared_.parents[order] = index;
  }

  // The last node that comes before a child of a node. Costs are searched by sixteens.
  __device__ int find(float cost, uint32_t parent) const {
    const float* costs = shared_.costs[now_];
    int first = 0;
#pragma unroll 4
    for (int at = 16; at < size_; at += 16) first += costs[at] < cost ? 16 : 0;
    int last = first - 1;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 some = reinterpret_cast<const float4*>(costs + first)[i];
      last += (some.x < cost ? 1 : 0) + (some.y < cost ? 1 : 0) + (some.z < cost ? 1 : 0) + (some.w < cost ? 1 : 0);
    }
    last = max(last, static_cast<int>(parent));
#pragma unroll 1
    while (last + 1 < size_ && costs[last + 1] == cost && shared_.nodes[now_][last + 1].parent < parent) ++last;
    return last;
  }

  // One warp: firsts from counts.
  __device__ void sum_counts() {
    constexpr int kOwn = kDraftMaxNodes / 32;
    const uint4* counts = reinterpret_cast<const uint4*>(shared_.counts + thread_ * kOwn);
    const uint4 low = counts[0], high = counts[1];
    const uint32_t own[kOwn] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    uint32_t total = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) total += own[i];
    uint32_t before = total;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
      const uint32_t others = __shfl_sync(kWholeWarp, before, max(thread_ - step, 0));
      before += thread_ >= step ? others : 0;
    }
    if (thread_ == 31) shared_.firsts[kDraftMaxNodes] = before;
    before -= total;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      shared_.firsts[thread_ * kOwn + i] = before;
      before += own[i];
    }
  }

  __device__ TreeNode moved(TreeNode node) const {
    node.parent += shared_.firsts[node.parent];
    return node;
  }

  __device__ void put(int buffer, int index, const TreeNode& node) {
    shared_.nodes[buffer][index] = node;
    shared_.costs[buffer][index] = node.cost;
  }

  __device__ static bool is_cost(float cost) { return __float_as_uint(cost) < kNoCost; }

  const DraftLists& lists_;
  const ChildNumbers& numbers_;
  TreeShared& shared_;
  const int num_nodes_, num_children_, thread_;
  int now_;   // which of the buffers holds the tree
  int size_;  // of it
  int num_parents_;
};

}  // namespace flashtrie
#endif
