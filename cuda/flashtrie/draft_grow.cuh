// The best tree from candidate lists, level by level, by a whole block (nvcc only).
//
// The tree's order is (cost, parent's place in that order, rank among its parent's children): cost rises from parent to
// child, so the N first prefixes by it are a tree, and they are what picking the best offer N - 1 times gives. Here the
// best nodes found so far and the candidates of one more level are merged at once: each finds its new place by counting
// who comes before it, in the best so far and in the runs of the level, which are sorted: run r holds the children of
// rank r of the level's nodes. A tree that ends early, as most do, costs as many rounds as it has levels.
//
// Keys are (cost's bits, 1 + place of the parent), so that ties are settled by the comparison; the root's is 0.
#pragma once
#include "draft_block.cuh"

#if defined(__CUDACC__) || defined(FT_EMULATION)

namespace flashtrie {

constexpr int kRunsAtOnce = 8;         // searched together, so that their reads overlap
constexpr uint32_t kNoCost = 0x7fffffffu;  // bits of a NaN: it ends a list, and every sum with it ends one too
constexpr uint64_t kNoKey = ~uint64_t(0);

// Candidates of every depth in shared memory: costs (negated log-probs) ascending, with at least one end where a row has
// fewer than top_k, and ends up to the stride.
struct DraftLists {
  float* costs;   // [num_depths, stride]
  uint32_t* ids;  // [num_depths, stride]
  int stride;     // top_k rounded up to kRunsAtOnce

  FT_HD static int stride_of(int top_k) { return (top_k + kRunsAtOnce - 1) / kRunsAtOnce * kRunsAtOnce; }
};

// What growing needs in shared memory. Of two copies one is read and the other written, by turns.
struct GrowShared {
  uint64_t* keys;    // [2, places] the best nodes so far, ascending, then kNoKey
  uint64_t* level;   // [2, places] those of the deepest level: cost, 1 + own place among the best; then kNoKey
  uint32_t* listed;  // [2, places] where the lists have a node: depth below the first << 16 | rank
  uint32_t* moved;   // [places] new places of the best
  uint32_t* counts;  // [2] of the best: low half all, high half those of the new level
  int places;        // a power of two, at least the tree's nodes: what a binary search may look at

  __device__ GrowShared(unsigned char* memory, int num_nodes) : places(power_of_two_at_least(num_nodes)) {
    keys = reinterpret_cast<uint64_t*>(memory);
    level = keys + 2 * places;
    listed = reinterpret_cast<uint32_t*>(level + 2 * places);
    moved = listed + 2 * places;
    counts = moved + places;
  }
  __device__ unsigned char* end() const { return reinterpret_cast<unsigned char*>(counts + 4); }
};

__device__ __forceinline__ uint64_t cost_key(uint32_t cost, uint32_t low) {
  return static_cast<uint64_t>(cost) << 32 | low;
}

__device__ __forceinline__ uint32_t child_cost(uint64_t parent, float cost) {
  return __float_as_uint(__uint_as_float(static_cast<uint32_t>(parent >> 32)) + cost);
}

// How many of the level's possible children come before the one of `key` and `rank`. Runs end where `runs` does, a power
// of two above the level's size.
__device__ __forceinline__ int children_before(const uint64_t* level, int runs, const float* costs, int stride,
                                               uint64_t key, int rank) {
  int before = 0;
#pragma unroll 1
  for (int first = 0; first < stride; first += kRunsAtOnce) {
    float run_costs[kRunsAtOnce];
    uint32_t lows[kRunsAtOnce], found[kRunsAtOnce];
#pragma unroll
    for (int i = 0; i < kRunsAtOnce; ++i) {
      run_costs[i] = costs[first + i];
      lows[i] = static_cast<uint32_t>(key) + (first + i < rank ? 1 : 0);
      found[i] = 0;
    }
#pragma unroll 1
    for (int step = runs >> 1; step > 0; step >>= 1) {
#pragma unroll
      for (int i = 0; i < kRunsAtOnce; ++i) {
        const uint64_t parent = level[found[i] + step - 1];
        const uint64_t other = cost_key(child_cost(parent, run_costs[i]), static_cast<uint32_t>(parent));
        if (other < cost_key(static_cast<uint32_t>(key >> 32), lows[i])) found[i] += step;
      }
    }
#pragma unroll
    for (int i = 0; i < kRunsAtOnce; ++i) before += static_cast<int>(found[i]);
  }
  return before;
}

// How many of the best come before `key`; `places`, a power of two, is at least their number.
__device__ __forceinline__ int best_before(const uint64_t* keys, int places, uint64_t key) {
  int before = 1;  // the root, and from there on a search over the places behind it
#pragma unroll 1
  for (int step = places >> 1; step > 0; step >>= 1)
    if (keys[before + step - 1] < key) before += step;
  return before;
}

class TreeGrowth {
 public:
  __device__ TreeGrowth(const GrowShared& shared, int num_nodes, int top_k)
      : shared_(shared), num_nodes_(num_nodes), top_k_(top_k), size_(1), level_size_(0), turn_(0) {}

  // Starts with the root alone. The whole block, before a barrier.
  __device__ void clear() {
#pragma unroll 1
    for (int at = threadIdx.x; at < 4 * shared_.places; at += kDraftThreads)  // of keys and level
      shared_.keys[at] = at == 0 ? 0 : kNoKey;
    if (threadIdx.x < 2) shared_.counts[threadIdx.x] = 0;
  }

  // The first level. The whole block, after a barrier.
  __device__ void add_children(const float* costs) {
    const int lane = threadIdx.x & 31;
    const bool is_child = lane < top_k_ && lane < num_nodes_ - 1 && __float_as_uint(costs[lane]) < kNoCost;
    level_size_ = __popc(__ballot_sync(kWholeWarp, is_child));
    size_ = 1 + level_size_;
    if (threadIdx.x < 32 && is_child) {
      const uint32_t cost = __float_as_uint(costs[lane]);
      shared_.keys[1 + lane] = cost_key(cost, 1);
      shared_.level[lane] = cost_key(cost, 2 + lane);
      shared_.listed[1 + lane] = lane;
    }
    __syncthreads();
  }

  // Whether some child of the deepest level belongs to the tree, as far as the best so far say; the same in all threads.
  __device__ bool goes_on(const float* costs) const {
    if (level_size_ == 0) return false;
    const uint64_t parent = level(turn_)[0];
    const uint32_t cost = child_cost(parent, costs[0]);
    if (cost >= kNoCost) return false;
    return size_ < num_nodes_ || cost_key(cost, static_cast<uint32_t>(parent)) < keys(turn_)[num_nodes_ - 1];
  }

  // One more level, from the candidates of its depth. The whole block, between barriers.
  __device__ void add_level(const float* costs, int stride, uint32_t depth) {
    const uint64_t *keys = this->keys(turn_), *level = this->level(turn_);
    uint64_t *new_keys = this->keys(turn_ ^ 1), *new_level = this->level(turn_ ^ 1);
    const uint32_t* listed = this->listed(turn_);
    uint32_t* new_listed = this->listed(turn_ ^ 1);
    const int lane = threadIdx.x & 31;
    const int shift = 32 - __clz(level_size_ - 1), width = 1 << shift;  // a power of two, at least level_size_
    const int runs = level_size_ == width ? 2 * width : width;
    const int best_places = (size_ + 31) & ~31, num_places = best_places + (top_k_ << shift);
    const uint32_t smallest = child_cost(level[0], costs[0]);
    const uint64_t largest = size_ == num_nodes_ ? keys[num_nodes_ - 1] : cost_key(kNoCost, 0);
    const int search_places = power_of_two_at_least(size_);
    uint32_t kept_best = 0, kept_new = 0;
#pragma unroll 1
    for (int base = static_cast<int>(threadIdx.x) - lane; base < num_places; base += kDraftThreads) {
      const bool is_best = base < best_places;
      const int at = base + lane, candidate = at - best_places;
      const int rank = is_best ? 0 : min(candidate >> shift, stride - 1), node = candidate & (width - 1);
      uint64_t key;
      bool is_alive;
      if (is_best) {
        key = at < size_ ? keys[at] : 0;
        is_alive = static_cast<uint32_t>(key >> 32) >= smallest && at > 0 && at < size_;
      } else {
        const uint64_t parent = level[node];
        key = cost_key(child_cost(parent, costs[rank]), static_cast<uint32_t>(parent));
        // (node + 1)(rank + 1) - 1 candidates come before it, and the root.
        is_alive = key < largest && candidate >> shift < top_k_ && node < level_size_ &&
                   (node + 1) * (rank + 1) < num_nodes_;
      }
      int place = at, in_level = 0;
      if (__any_sync(kWholeWarp, is_alive)) {
        in_level = children_before(level, runs, costs, stride, key, rank);
        place = in_level + (is_best ? at : best_before(keys, search_places, key));
      }
      if (is_best) {
        if (!is_alive) place = at;
        const bool is_kept = at < size_ && place < num_nodes_;
        kept_best += __popc(__ballot_sync(kWholeWarp, is_kept));
        if (at < size_) shared_.moved[at] = static_cast<uint32_t>(place);
        if (is_kept) {
          new_keys[place] = key;
          new_listed[place] = listed[at];
        }
      } else {
        const bool is_kept = is_alive && place < num_nodes_;
        kept_new += __popc(__ballot_sync(kWholeWarp, is_kept));
        if (is_kept) {
          new_keys[place] = key;
          new_listed[place] = depth << 16 | rank;
          new_level[in_level] = cost_key(static_cast<uint32_t>(key >> 32), place + 1);
        }
      }
    }
    uint32_t* counts = shared_.counts + turn_;
    if (lane == 0 && kept_best + kept_new > 0) atomicAdd(counts, kept_best + kept_new + (kept_new << 16));
    __syncthreads();
    turn_ ^= 1;
    size_ = static_cast<int>(*counts & 0xffff);
    const int old_level = level_size_;
    level_size_ = static_cast<int>(*counts >> 16);
    // Parents have moved.
#pragma unroll 1
    for (int at = 1 + static_cast<int>(threadIdx.x); at < size_; at += kDraftThreads) {
      const uint64_t key = new_keys[at];
      new_keys[at] = cost_key(static_cast<uint32_t>(key >> 32), shared_.moved[static_cast<uint32_t>(key) - 1] + 1);
    }
    uint64_t* old_entries = this->level(turn_ ^ 1);
#pragma unroll 1
    for (int at = threadIdx.x; at < old_level; at += kDraftThreads) old_entries[at] = kNoKey;
    if (threadIdx.x == 0) shared_.counts[turn_] = 0;
    __syncthreads();
  }

  __device__ int size() const { return size_; }

  // Of the finished tree.
  __device__ uint32_t parent(int node) const { return static_cast<uint32_t>(keys(turn_)[node]) - 1; }
  __device__ float cost(int node) const { return __uint_as_float(static_cast<uint32_t>(keys(turn_)[node] >> 32)); }
  __device__ uint32_t listed_at(int node) const { return listed(turn_)[node]; }

 private:
  __device__ uint64_t* keys(int turn) const { return shared_.keys + turn * shared_.places; }
  __device__ uint64_t* level(int turn) const { return shared_.level + turn * shared_.places; }
  __device__ uint32_t* listed(int turn) const { return shared_.listed + turn * shared_.places; }

  const GrowShared shared_;
  const int num_nodes_, top_k_;
  int size_, level_size_, turn_;
};

}  // namespace flashtrie
#endif
