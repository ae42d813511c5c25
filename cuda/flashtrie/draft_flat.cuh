// The best tree from candidate lists where it has three levels at most, by a whole block in one or two rounds (nvcc only).
//
// A drafter that is not sure spreads its tree over many children of few nodes. Then nodes find their places by counting who
// comes before them: all children and grandchildren of the root together, and if the third level matters, the best of those
// with the children of the grandchildren. The N - 1 first are the tree if the best node of one more level comes after them.
//
// Keys are (cost's bits, parent's place, rank): unique, and compared as integers. A parent's place among the nodes of the
// levels above is as good as its place in the tree, since their order is the same.
#pragma once
#include "draft_pick.cuh"

#if defined(__CUDACC__) || defined(FT_EMULATION)

namespace flashtrie {

constexpr int kFlatKeys = 2;  // of a thread, where there are three levels

struct FlatShared {
  alignas(16) uint64_t keys[kFlatKeys * kDraftThreads];
  uint32_t index_of[kDraftThreads];  // the tree's index of a child of the root; then of what comes before the third level
  uint32_t count;
  int is_done;
};

class FlatTree {
 public:
  __device__ FlatTree(int top_k, int num_nodes)
      : top_k_(top_k),
        num_nodes_(num_nodes),
        num_candidates_(top_k * (top_k + 1)),
        shift_(2 * num_candidates_ <= kDraftThreads ? 1 : 0),
        own_(threadIdx.x & ((1 << shift_) - 1)),
        at_(static_cast<int>(threadIdx.x) >> shift_),
        child_(at_ < top_k ? -1 : min((at_ - top_k) / top_k, top_k - 1)),
        rank_(at_ < top_k ? at_ : min(at_ - top_k - child_ * top_k, top_k)) {}

  // False if the tree is not flat. The whole block, after a barrier; ends with one.
  __device__ bool grow(const DraftLists& lists, TreeShared& tree, FlatShared& flat) const {
    if (num_candidates_ > kDraftThreads || num_nodes_ < 2) return false;
    const float* costs = lists.costs;
    const int stride = lists.stride;
    const float third = costs[0] + costs[stride] + costs[2 * stride];
    const uint32_t place = child_ < 0 ? rank_ : stride + rank_;
    const float cost = child_ < 0 ? costs[place] : costs[child_] + costs[place];
    const uint64_t key = node_key(cost, child_ + 1, rank_);
    const bool is_one = at_ < num_candidates_ && own_ == 0;
    if (is_one) flat.keys[at_] = key;
    if (threadIdx.x == 0) flat.count = 0;
    __syncthreads();
    const int index = 1 + count_before(flat, num_candidates_, key, own_, shift_);
    const bool is_node = is_one && __float_as_uint(cost) < kNoCost, is_in = is_node && index < num_nodes_;
    if (is_one && child_ < 0) flat.index_of[at_] = index;
    if (is_one && index == min(num_nodes_ - 1, num_candidates_)) flat.is_done = is_last(cost, index, third);
    const int size = 1 + __syncthreads_count(is_in);
    if (is_in) put(tree, {static_cast<uint32_t>(index), child_ < 0 ? 0 : flat.index_of[child_], 0}, place, cost);
    if (threadIdx.x < 32) tree.masks[0][threadIdx.x] = threadIdx.x == 0 ? 1 : 0;
    if (threadIdx.x == 0) tree.size = size;
    const bool is_done = flat.is_done;
    const bool is_full = __syncthreads_or(is_in && rank_ == top_k_ - 1);
    if (threadIdx.x == 0) tree.is_full = is_full;  // it is thread 0 that asks
    return is_done || grow_third(lists, tree, flat, size);
  }

 private:
  // A node's index, its parent's, and its parent's parent's.
  struct Line {
    uint32_t index, parent, grandparent;
  };

  __device__ static uint64_t node_key(float cost, uint32_t parent, uint32_t rank) {
    return static_cast<uint64_t>(__float_as_uint(cost)) << 32 | parent << 8 | rank;
  }

  // Whether the tree ends with a node, given the best cost of one more level.
  __device__ bool is_last(float cost, int index, float deeper) const {
    return __float_as_uint(deeper) >= kNoCost || (index == num_nodes_ - 1 && cost < deeper);
  }

  // How many of the keys come before one, counted by 1 << shift threads.
  __device__ static int count_before(const FlatShared& flat, int num_keys, uint64_t key, int own, int shift) {
    const ulonglong2* pairs = reinterpret_cast<const ulonglong2*>(flat.keys);
    int first = 0, second = 0;
#pragma unroll 6
    for (int pair = own; pair < num_keys / 2; pair += 1 << shift) {
      first += pairs[pair].x < key ? 1 : 0;
      second += pairs[pair].y < key ? 1 : 0;
    }
    const int count = first + second;
    return shift == 0 ? count : count + __shfl_xor_sync(kWholeWarp, count, 1);
  }

  __device__ void put(TreeShared& tree, const Line& line, uint32_t place, float cost) const {
    tree.nodes[line.index] = {line.parent, place, cost, 0.0f};
#pragma unroll 1
    for (uint32_t word = 0; word < static_cast<uint32_t>(num_nodes_ + 31) / 32; ++word)
      tree.masks[line.index][word] =
          (word == 0 ? 1 : 0) | bit(line.index, word) | bit(line.parent, word) | bit(line.grandparent, word);
  }

  __device__ static uint32_t bit(uint32_t index, uint32_t word) {
    return index >> 5 == word ? 1u << (index & 31) : 0;
  }

  // The same with one more level; the tree has `size` nodes of those above.
  __device__ bool grow_third(const DraftLists& lists, TreeShared& tree, FlatShared& flat, int size) const {
    const int stride = lists.stride, num_above = size - 1;
    const float* costs = lists.costs + 2 * stride;
    const float third = lists.costs[0] + lists.costs[stride] + costs[0], fourth = third + costs[stride];
    const bool is_deep = fourth < tree.nodes[max(num_above / 2, 1)].cost;  // it will hardly end with the third
    if (is_deep) __syncthreads();                                           // before somebody overwrites what others read
    if (is_deep) return false;
    const float limit = size == num_nodes_ ? tree.nodes[num_above].cost : INFINITY;
    const int thread = static_cast<int>(threadIdx.x);
    bool is_settled = false;  // all of the third level comes after it
    if (thread < num_above) {
      const PickedNode node = tree.nodes[1 + thread];
      flat.keys[thread] = node_key(node.cost, node.parent, node.place & (stride - 1));
      is_settled = node.cost < third;
    }
    const int num_settled = __syncthreads_count(is_settled);
    list_third(costs, tree, flat, limit, num_above, num_settled, stride);
    __syncthreads();
    const int num_keys = num_above + static_cast<int>(flat.count);
    if (num_keys >= kFlatKeys * kDraftThreads) return false;
    if (thread == 0) flat.keys[num_keys] = ~uint64_t(0);  // for a pair
    // What this thread's keys stand for, with indices among the nodes above.
    uint64_t keys[kFlatKeys];
    uint32_t places[kFlatKeys], grandparents[kFlatKeys];
#pragma unroll
    for (int i = 0; i < kFlatKeys; ++i) {
      const int at = thread + i * kDraftThreads;
      keys[i] = at < num_keys ? flat.keys[at] : 0;
      places[i] = at < num_above ? tree.nodes[1 + at].place : 2 * stride + key_rank(keys[i]);
      grandparents[i] = key_parent(keys[i]) == 0 ? 0 : tree.nodes[key_parent(keys[i])].parent;
    }
    __syncthreads();
    int indices[kFlatKeys];
    find_indices(flat, num_keys + 1, keys, indices);
    if (thread < num_above) flat.index_of[1 + thread] = indices[0];
    const int last = min(num_nodes_ - 1, num_keys);
#pragma unroll
    for (int i = 0; i < kFlatKeys; ++i)
      if (thread + i * kDraftThreads < num_keys && indices[i] == last) flat.is_done = is_last(key_cost(keys[i]), last, fourth);
    __syncthreads();
    if (!flat.is_done) return false;
    bool is_full = false;
#pragma unroll
    for (int i = 0; i < kFlatKeys; ++i) {
      if (thread + i * kDraftThreads >= num_keys || indices[i] >= num_nodes_) continue;
      const uint32_t parent = key_parent(keys[i]);
      put(tree,
          {static_cast<uint32_t>(indices[i]), parent == 0 ? 0 : flat.index_of[parent],
           grandparents[i] == 0 ? 0 : flat.index_of[grandparents[i]]},
          places[i], key_cost(keys[i]));
      is_full |= key_rank(keys[i]) == static_cast<uint32_t>(top_k_) - 1;
    }
    is_full = __syncthreads_or(is_full);
    if (thread == 0) {
      tree.size = 1 + last;
      tree.is_full = is_full;
    }
    __syncthreads();
    return true;
  }

  __device__ static float key_cost(uint64_t key) { return __uint_as_float(static_cast<uint32_t>(key >> 32)); }
  __device__ static uint32_t key_parent(uint64_t key) { return static_cast<uint32_t>(key) >> 8; }
  __device__ static uint32_t key_rank(uint64_t key) { return static_cast<uint32_t>(key) & 0xff; }

  // The tree's indices that keys have among all.
  __device__ static void find_indices(const FlatShared& flat, int num_keys, const uint64_t* keys, int* indices) {
    const ulonglong2* pairs = reinterpret_cast<const ulonglong2*>(flat.keys);
#pragma unroll
    for (int i = 0; i < kFlatKeys; ++i) indices[i] = 1;
#pragma unroll 4
    for (int pair = 0; pair < num_keys / 2; ++pair) {
      const ulonglong2 others = pairs[pair];
#pragma unroll
      for (int i = 0; i < kFlatKeys; ++i) indices[i] += (others.x < keys[i] ? 1 : 0) + (others.y < keys[i] ? 1 : 0);
    }
  }

  // Children of grandchildren of the root that may be in the tree, behind the keys of the nodes above.
  __device__ void list_third(const float* costs, const TreeShared& tree, FlatShared& flat, float limit, int num_above,
                             int num_settled, int stride) const {
    const int log2_ranks = 32 - __clz(top_k_ - 1), thread = static_cast<int>(threadIdx.x);
#pragma unroll 1
    for (int at = thread; at < num_above << log2_ranks; at += kDraftThreads) {
      const int index = 1 + (at >> log2_ranks), rank = at & ((1 << log2_ranks) - 1);
      const PickedNode node = tree.nodes[index];
      const float cost = node.cost + costs[min(rank, top_k_)];
      // What is settled and all up to its parent come before it, and of those grandchildren the children up to its rank.
      int num_grandchildren = index;
      for (int child = 0; child < top_k_; ++child)
        num_grandchildren -= flat.index_of[child] <= static_cast<uint32_t>(index) ? 1 : 0;
      const int before = max(index, num_settled) + num_grandchildren * (rank + 1) - 1;
      const bool is_listed = node.place >= static_cast<uint32_t>(stride) && cost <= limit && before < num_nodes_ - 1;
      if (!is_listed) continue;
      const uint32_t to = num_above + atomicAdd(&flat.count, 1u);
      if (to < kFlatKeys * kDraftThreads) flat.keys[to] = node_key(cost, index, rank);
    }
  }

  const int top_k_, num_nodes_, num_candidates_;
  const int shift_;  // log2 of the threads that count for a candidate of the first two levels
  const int own_;    // this thread's number among them
  const int at_;     // its candidate: children of the root, then their children
  const int child_;  // whose child that is; -1: the root's
  const int rank_;   // among its parent's children
};

}  // namespace flashtrie
#endif
