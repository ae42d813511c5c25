// The best tree from candidate lists, level by level, by a whole block (nvcc only).
//
// The tree's order is (cost, parent's place in that order, rank among its parent's children): cost rises from parent to
// child, so the N first prefixes by it are a tree, and they are what picking the best offer N - 1 times gives. Here the
// best nodes found so far and the candidates of one more level are merged at once. Those so far that come before all the
// candidates are settled; the others and the candidates find their places by counting who comes before them. So a tree
// costs as many rounds as it has levels, and few instructions a round: a block that runs alone takes its time by them.
//
// Keys are (cost's bits, 1 + parent's place << 8 | rank): unique, and compared as integers; the root's is 0.
#pragma once
#include "draft_block.cuh"

#if defined(__CUDACC__) || defined(FT_EMULATION)

namespace flashtrie {

constexpr uint32_t kNoCost = 0x7fffffffu;   // bits of a NaN: it ends a list, and every sum with it ends one too
constexpr uint64_t kNoKey = ~uint64_t(0);   // above all keys; its cost is above all costs

// Candidates of every depth in shared memory: costs (negated log-probs) ascending, then ends, at least two; behind the last
// depth are two rows of ends.
struct DraftLists {
  float* costs;   // [num_depths + 2, stride]
  uint32_t* ids;  // [num_depths + 2, stride]
  int stride;     // top_k + 2 rounded up to a power of two
};

__device__ __forceinline__ uint64_t cost_key(uint32_t cost, uint32_t parent, uint32_t rank) {
  return static_cast<uint64_t>(cost) << 32 | (parent + 1) << 8 | rank;
}

__device__ __forceinline__ uint32_t key_cost(uint64_t key) { return static_cast<uint32_t>(key >> 32); }
__device__ __forceinline__ uint32_t key_parent(uint64_t key) { return (static_cast<uint32_t>(key) >> 8) - 1; }

// Most nodes and candidates that a round finds places for: those of 256 nodes that have fewer than 256 before them, with
// 32 candidates each (list_capacity of cuda_draft_layout.py), rounded up.
constexpr int kMostListed = 1040;

// What growing needs in shared memory; of one size, so that addresses need no registers.
struct GrowShared {
  uint64_t keys[kDraftMaxNodes];                // the best nodes so far, ascending
  uint64_t list[kMostListed];                   // what a round finds places for
  alignas(16) uint32_t costs[kMostListed];      // their costs; behind them those of kNoKey
  uint32_t origins[kMostListed];                // where the lists have it << 16 | old place of one of the best, or 0xffff
  uint32_t places[kDraftMaxNodes];              // where the lists have a node
  uint32_t moved[kDraftMaxNodes];               // new places of the best so far
  uint32_t level[kDraftMaxNodes];               // the nodes of the deepest level, ascending
  uint32_t claims[kDraftMaxNodes];              // whether a place is taken in this round
  uint32_t count;                               // of the candidates in the list
};

static_assert((sizeof(GrowShared) + 15) / 16 * 16 == 22800, "GROW_BYTES of cuda_draft_layout.py");

class TreeGrowth {
 public:
  __device__ TreeGrowth(GrowShared& shared, const DraftSizes& sizes, int list_capacity)
      : shared_(shared),
        num_nodes_(sizes.num_nodes),
        top_k_(sizes.top_k),
        list_capacity_(list_capacity),
        size_(1),
        level_size_(0) {}

  // The root and its children. The whole block, after a barrier; ends with one.
  __device__ void add_children(const float* costs) {
    const int lane = threadIdx.x & 31;
    const bool is_child = lane < top_k_ && lane < num_nodes_ - 1 && __float_as_uint(costs[lane]) < kNoCost;
    level_size_ = __popc(__ballot_sync(kWholeWarp, is_child));
    size_ = 1 + level_size_;
    if (threadIdx.x < 32 && is_child) {
      shared_.keys[1 + lane] = cost_key(__float_as_uint(costs[lane]), 0, lane);
      shared_.places[1 + lane] = lane;
      shared_.level[lane] = 1 + lane;
    }
    clear_list();
    __syncthreads();
  }

  // One more level, from the candidates of its depth; false if none of them belongs to the tree. The whole block, after a
  // barrier; ends with one.
  __device__ bool add_level(const DraftLists& lists, int depth) {
    if (level_size_ == 0) return false;
    const float* costs = lists.costs + depth * lists.stride;
    const uint64_t first = child_key(shared_.level[0], costs, 0);
    const uint64_t last = size_ == num_nodes_ ? shared_.keys[size_ - 1] : cost_key(kNoCost, 0, 0);
    if (first >= last) return false;
    const int settled = count_best([&](int at) { return shared_.keys[at] < first; });
    const Window window{settled, size_ - settled, (size_ - settled + 3) / 4 * 4};
    list_best(window);
    list_candidates(costs, depth * lists.stride, last, window);
    __syncthreads();
    const int num_candidates = static_cast<int>(shared_.count), listed = window.begin + num_candidates;
    // Equal costs count alike, and only one of their nodes gets the place.
    const bool may_tie = listed > kDraftThreads || __syncthreads_or(!claim(window, num_candidates));
    if (may_tie) {
      place(listed, settled);
      __syncthreads();
    }
    size_ = min(num_nodes_, size_ + num_candidates);
    settle(depth * lists.stride, settled);
    __syncthreads();
    return true;
  }

  // Makes ready for the next round. The whole block, before a barrier.
  __device__ void clear_list() const {
#pragma unroll 1
    for (int at = 4 * threadIdx.x; at < list_capacity_; at += 4 * kDraftThreads)
      *reinterpret_cast<uint4*>(shared_.costs + at) = make_uint4(~0u, ~0u, ~0u, ~0u);
#pragma unroll 1
    for (int at = threadIdx.x; at < num_nodes_; at += kDraftThreads) shared_.claims[at] = 0;
    if (threadIdx.x == 0) shared_.count = 0;
  }

  // A tree of so many nodes that somebody else put into `keys` and `places`.
  __device__ void take(int size) { size_ = size; }

  __device__ int size() const { return size_; }
  __device__ uint32_t parent(int node) const { return key_parent(shared_.keys[node]); }
  __device__ float cost(int node) const { return __uint_as_float(key_cost(shared_.keys[node])); }
  __device__ uint32_t place(int node) const { return shared_.places[node]; }

 private:
  __device__ uint64_t child_key(uint32_t parent, const float* costs, int rank) const {
    const float cost = __uint_as_float(key_cost(shared_.keys[parent])) + costs[rank];
    return cost_key(__float_as_uint(cost), parent, rank);
  }

  // How many of the best so far fulfil a condition; every warp counts them all.
  template <typename Condition>
  __device__ int count_best(const Condition& condition) const {
    const int lane = threadIdx.x & 31;
    int count = 0;
#pragma unroll 1
    for (int base = 0; base < size_; base += 32)
      count += __popc(__ballot_sync(kWholeWarp, base + lane < size_ && condition(base + lane)));
    return count;
  }

  __device__ void put(int at, uint64_t key, uint32_t origin) const {
    shared_.list[at] = key;
    shared_.costs[at] = key_cost(key);
    shared_.origins[at] = origin;
  }

  // The list: those of the best that are not settled, in order; nothing, up to a multiple of four; candidates.
  struct Window {
    int settled;   // of the best
    int num_best;  // that are listed
    int begin;     // of the candidates
  };

  __device__ void list_best(const Window& window) const {
#pragma unroll 1
    for (int at = threadIdx.x; at < window.begin; at += kDraftThreads) {
      const int from = min(window.settled + at, size_ - 1);
      const uint64_t key = at < window.num_best ? shared_.keys[from] : kNoKey;
      put(at, key, shared_.places[from] << 16 | from);
    }
  }

  // Candidates that may belong to the tree, behind those of the best that are listed, in any order.
  __device__ void list_candidates(const float* costs, int first_place, uint64_t last, const Window& window) const {
    const int lane = threadIdx.x & 31, shift = 32 - __clz(top_k_ - 1);
#pragma unroll 1
    for (int base = static_cast<int>(threadIdx.x) - lane; base < level_size_ << shift; base += kDraftThreads) {
      const int rank = (base + lane) & ((1 << shift) - 1), node = (base + lane) >> shift;
      const uint32_t parent = shared_.level[min(node, level_size_ - 1)];
      const uint64_t key = child_key(parent, costs, min(rank, top_k_));
      // The settled and the best up to its parent come before it, and (node + 1)(rank + 1) - 1 candidates.
      const bool is_listed = key < last && rank < top_k_ && node < level_size_ &&
                             max(static_cast<int>(parent) + 1, window.settled) + (node + 1) * (rank + 1) <= num_nodes_;
      const uint32_t votes = __ballot_sync(kWholeWarp, is_listed);
      if (votes == 0) continue;
      uint32_t at = 0;
      if (lane == 0) at = atomicAdd(&shared_.count, static_cast<uint32_t>(__popc(votes)));
      at = __shfl_sync(kWholeWarp, at, 0) + window.begin + __popc(votes & lanes_below(lane));
      if (is_listed) put(static_cast<int>(at), key, static_cast<uint32_t>(first_place + rank) << 16 | 0xffff);
    }
  }

  // As many lanes count for each of the list as there are threads for, at most eight.
  __device__ static int log2_lanes(int listed) {
    return listed > kDraftThreads / 2 ? 0 : listed > kDraftThreads / 4 ? 1 : listed > kDraftThreads / 8 ? 2 : 3;
  }

  // How many of the candidates cost less.
  __device__ int cheaper_candidates(const Window& window, int num_candidates, uint32_t cost, int own, int lanes) const {
    const uint4* fours = reinterpret_cast<const uint4*>(shared_.costs + window.begin);
    int count = 0;
#pragma unroll 2
    for (int i = own; 4 * i < num_candidates; i += lanes) {
      const uint4 four = fours[i];
      count += (four.x < cost ? 1 : 0) + (four.y < cost ? 1 : 0) + (four.z < cost ? 1 : 0) + (four.w < cost ? 1 : 0);
    }
#pragma unroll 1
    for (int step = lanes >> 1; step > 0; step >>= 1) count += __shfl_xor_sync(kWholeWarp, count, step);
    return count;
  }

  // How many of the best that are listed cost less.
  __device__ int cheaper_best(const Window& window, uint32_t cost) const {
    int count = 0;
#pragma unroll 1
    for (int step = power_of_two_at_least(window.num_best + 1) >> 1; step > 0; step >>= 1)
      if (count + step <= window.num_best && shared_.costs[count + step - 1] < cost) count += step;
    return count;
  }

  // The thread's item of the list goes to the place that its cost says; false if somebody else has it. The list is no longer
  // than the block.
  __device__ bool claim(const Window& window, int num_candidates) const {
    const int listed = window.begin + num_candidates, log2 = log2_lanes(listed), lanes = 1 << log2;
    const int at = static_cast<int>(threadIdx.x) >> log2, own = threadIdx.x & (lanes - 1);
    const uint64_t key = shared_.list[min(at, listed - 1)];
    int place = window.settled + cheaper_candidates(window, num_candidates, key_cost(key), own, lanes);
    place += at < window.num_best ? at : cheaper_best(window, key_cost(key));
    if (own != 0 || at >= listed || key == kNoKey || place >= num_nodes_) return true;
    if (atomicExch(&shared_.claims[place], 1u) != 0) return false;
    put_in_place(at, key, place);
    return true;
  }

  // The list goes to the places that its keys say, whatever its length.
  __device__ void place(int listed, int settled) const {
#pragma unroll 1
    for (int base = static_cast<int>(threadIdx.x) & ~31; base < listed; base += kDraftThreads) {
      const int at = base + static_cast<int>(threadIdx.x & 31);
      const uint64_t key = shared_.list[min(at, listed - 1)];
      const int place = settled + count_by_lanes(shared_.list, listed, key, 0, 1, [&](uint64_t other) { return other < key; });
      if (at < listed && key != kNoKey && place < num_nodes_) put_in_place(at, key, place);
    }
  }

  __device__ void put_in_place(int at, uint64_t key, int place) const {
    const uint32_t origin = shared_.origins[at];
    shared_.keys[place] = key;
    shared_.places[place] = origin >> 16;
    if ((origin & 0xffff) != 0xffff) shared_.moved[origin & 0xffff] = place;
  }

  // Parents have moved, too; and which nodes are of the new level, whose candidates begin at `first_place`.
  __device__ void settle(uint32_t first_place, int settled) {
    const int lane = threadIdx.x & 31;
    int before = 0;  // of the new level
#pragma unroll 1
    for (int base = 0; base < size_; base += 32) {
      const int at = base + lane;
      const bool is_new = at < size_ && shared_.places[at] >= first_place;
      const uint32_t votes = __ballot_sync(kWholeWarp, is_new);
      if (base == static_cast<int>(threadIdx.x) - lane) {
        if (is_new) shared_.level[before + __popc(votes & lanes_below(lane))] = at;
        if (at >= settled && at < size_) {
          const uint64_t key = shared_.keys[at];
          const uint32_t parent = key_parent(key);
          if (static_cast<int>(parent) >= settled) shared_.keys[at] = cost_key(key_cost(key), shared_.moved[parent], key & 0xff);
        }
      }
      before += __popc(votes);
    }
    level_size_ = before;
    clear_list();
  }

  GrowShared& shared_;
  const int num_nodes_, top_k_, list_capacity_;
  int size_, level_size_;
};

}  // namespace flashtrie
#endif
