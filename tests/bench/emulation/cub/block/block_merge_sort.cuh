#pragma once
#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

namespace cub {
template <typename Key, int kThreads, int kItems, typename Value>
class BlockMergeSort {
 public:
  struct TempStorage {
    Key keys[kThreads * kItems + 1];
    Value values[1];
  };
  explicit BlockMergeSort(TempStorage&) {}

  template <typename Compare>
  void Sort(Key (&keys)[kItems], Value (&values)[kItems], Compare compare) {
    static std::pair<Key, Value> all[kThreads * kItems];
    for (int i = 0; i < kItems; ++i) all[threadIdx.x * kItems + i] = {keys[i], values[i]};
    __syncthreads();
    if (threadIdx.x == 0)
      std::stable_sort(all, all + kThreads * kItems,
                       [&](const auto& a, const auto& b) { return compare(a.first, b.first); });
    __syncthreads();
    for (int i = 0; i < kItems; ++i) std::tie(keys[i], values[i]) = all[threadIdx.x * kItems + i];
    __syncthreads();
  }
};
}  // namespace cub
