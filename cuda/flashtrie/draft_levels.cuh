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
constexpr int kMostPicked = 64;                       // nodes of a tree that may be picked: two a lane
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
        thread_(static_cast<int>(threadIdx.x)),
        num_firsts_(lists.top_k * (lists.top_k + 1)),
        shift_(2 * num_firsts_ <= kDraftThreads ? 1 : 0),
        first_(thread_ >> shift_),
        child_(first_ < lists.top_k ? -1 : min((first_ - lists.top_k) / lists.top_k, lists.top_k - 1)),
        rank_(first_ < lists.top_k ? first_ : min(first_ - lists.top_k - child_ * lists.top_k, lists.top_k)) {}

  // The whole block, after a barrier; ends with one. A tree of no size: it is small and has many levels, better picked.
  __device__ Tree grow(int num_depths) {
    float deepest = lists_.costs[0];  // the best cost of the last level
    int depth = 1;                    // of the last level
    if (num_firsts_ <= kDraftThreads && num_depths > 1) {
      start_with_two();
      deepest += lists_.costs[lists_.stride];
      depth = 2;
    } else {
      start_with_one();
    }
    if (!may_enter(deepest + lists_.costs[depth * lists_.stride])) return {shared_.nodes[now_], size_};
    if (num_nodes_ <= kMostPicked && goes_deep(deepest, depth, num_depths)) return {nullptr, 0};
    list_parents(depth);
#pragma unroll 1
    for (; depth < num_depths && num_parents_ > 0; ++depth) {
      deepest += lists_.costs[depth * lists_.stride];
      if (!may_enter(deepest)) break;
      add_level(depth);
    }
    return {shared_.nodes[now_], size_};
  }

 private:
  // The root and its children.
  __device__ void start_with_one() {
    const float cost = thread_ == 0 ? 0.0f : lists_.costs[min(thread_ - 1, lists_.stride - 1)];
    const bool is_node = thread_ == 0 || (thread_ <= lists_.top_k && thread_ < num_nodes_ && is_cost(cost));
    clear();
    if (is_node) put(0, thread_, {0, thread_ == 0 ? 0u - lists_.stride : thread_ - 1u, cost, 0.0f});
    size_ = __syncthreads_count(is_node);
  }

  // The root and the best of the first two levels, by counting who comes before each; one or two threads count.
  __device__ void start_with_two() {
    const uint32_t place = child_ < 0 ? rank_ : lists_.stride + rank_;
    const float cost = child_ < 0 ? lists_.costs[place] : lists_.costs[child_] + lists_.costs[place];
    const uint64_t key = child_key(cost, child_ + 1, rank_);
    const bool is_one = first_ < num_firsts_ && (thread_ & ((1 << shift_) - 1)) == 0;
    if (is_one) shared_.behind[first_] = key;
    clear();
    if (thread_ == 0) put(0, 0, {0, 0u - lists_.stride, 0.0f, 0.0f});
    __syncthreads();
    const int index = 1 + count_firsts(key);
    if (is_one && child_ < 0) shared_.firsts[first_] = index;
    const bool is_in = is_one && is_cost(cost) && index < num_nodes_;
    size_ = 1 + __syncthreads_count(is_in);
    if (is_in) put(0, index, {child_ < 0 ? 0 : shared_.firsts[child_], place, cost, 0.0f});
    __syncthreads();
  }

  __device__ int count_firsts(uint64_t key) const {
    const ulonglong2* pairs = reinterpret_cast<const ulonglong2*>(shared_.behind);
    int first = 0, second = 0;
#pragma unroll 6
    for (int pair = thread_ & ((1 << shift_) - 1); pair < num_firsts_ / 2; pair += 1 << shift_) {
      first += pairs[pair].x < key ? 1 : 0;
      second += pairs[pair].y < key ? 1 : 0;
    }
    const int count = first + second;
    return shift_ == 0 ? count : count + __shfl_xor_sync(kWholeWarp, count, 1);
  }

  __device__ void clear() {
    shared_.costs[0][thread_] = INFINITY;
    shared_.counts[thread_] = 0;
    now_ = 0;
  }

  // The nodes of the last level, which is `depth`. The whole block; ends with a barrier.
  __device__ void list_parents(int depth) {
    const bool is_one = thread_ > 0 && thread_ < size_ &&
                        shared_.nodes[0][thread_].place >= static_cast<uint32_t>((depth - 1) * lists_.stride);
    const uint32_t votes = __ballot_sync(kWholeWarp, is_one);
    if (thread_ % 32 == 0) shared_.firsts[thread_ / 32] = __popc(votes);
    num_parents_ = __syncthreads_count(is_one);
    int before = __popc(votes & lanes_below(thread_ % 32));
    for (int warp = 0; warp < thread_ / 32; ++warp) before += shared_.firsts[warp];
    if (is_one) shared_.parents[before] = thread_;
    __syncthreads();
  }

  // Whether a level whose best cost this is may have a node in the tree.
  __device__ bool may_enter(float cost) const {
    return is_cost(cost) && (size_ < num_nodes_ || cost <= shared_.costs[now_][size_ - 1]);
  }

  // Whether, by what is known of the first levels, the tree may have so many that picking its nodes is faster.
  __device__ bool goes_deep(float deepest, int depth, int num_depths) const {
    const int many = num_nodes_ <= 32 ? 6 : 10;  // picking 32 nodes takes 3 us, 64 nodes 9, a level about 1
    if (num_depths < many) return false;
    for (; depth < many; ++depth) deepest += lists_.costs[depth * lists_.stride];
    return may_enter(deepest);
  }

  // Merges in the children of the last level, which is `depth`.
  __device__ void add_level(int depth) {
    const float* costs = lists_.costs + depth * lists_.stride;
    const TreeNode* nodes = shared_.nodes[now_];
    const int num_children = numbers_.count;
    shared_.costs[1 - now_][thread_] = INFINITY;
#pragma unroll 1
    for (int at = thread_; at < num_children; at += kDraftThreads) {
      const int number = numbers_.of[at] >> ChildNumbers::kRankBits, rank = numbers_.of[at] & (kDraftMaxTopK - 1);
      shared_.afters[at] = kNoNode;
      if (number >= num_parents_) continue;
      const uint32_t parent = shared_.parents[number];
      const float cost = nodes[parent].cost + costs[rank];
      const int after = find(cost, parent);
      if (!is_cost(cost) || after + (number + 1) * (rank + 1) >= num_nodes_) continue;
      shared_.keys[at] = child_key(cost, parent, rank);
      shared_.afters[at] = after << 16 | atomicAdd(&shared_.counts[after], 1u);
    }
    __syncthreads();
    if (thread_ < 32) sum_counts();
    __syncthreads();
    shared_.counts[thread_] = 0;
    if (thread_ == 0) shared_.behind[shared_.firsts[kDraftMaxNodes]] = ~uint64_t(0);
#pragma unroll 1
    for (int at = thread_; at < num_children; at += kDraftThreads) {
      const uint32_t after = shared_.afters[at];
      if (after != kNoNode) shared_.behind[shared_.firsts[after >> 16] + (after & 0xffff)] = shared_.keys[at];
    }
    const int next = 1 - now_, index = thread_ + static_cast<int>(shared_.firsts[thread_]);
    const bool stays = thread_ < size_ && index < num_nodes_;
    if (stays) put(next, index, moved(nodes[thread_]));
    const int num_staying = __syncthreads_count(stays);
#pragma unroll 1
    for (int at = thread_; at < num_children; at += kDraftThreads)
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

  __device__ static uint64_t child_key(float cost, uint32_t parent, uint32_t rank) {
    return static_cast<uint64_t>(__float_as_uint(cost)) << 32 | parent << 8 | rank;
  }

  __device__ static bool is_cost(float cost) { return __float_as_uint(cost) < kNoCost; }

  const DraftLists& lists_;
  const ChildNumbers& numbers_;
  TreeShared& shared_;
  const int num_nodes_, thread_;
  const int num_firsts_;  // nodes that the first two levels may have
  const int shift_;       // log2 of the threads that count for one of them
  const int first_;       // this thread's
  const int child_;       // whose child that is; -1: the root's
  const int rank_;        // among its parent's children
  int now_;   // which of the buffers holds the tree
  int size_;  // of it
  int num_parents_;
};

}  // namespace flashtrie
#endif
