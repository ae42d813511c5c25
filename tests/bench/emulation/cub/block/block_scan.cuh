#pragma once

namespace cub {
template <typename T, int kThreads>
class BlockScan {
 public:
  struct TempStorage {
    T sums[1];
  };
  explicit BlockScan(TempStorage&) {}

  template <int kItems>
  void ExclusiveSum(T (&in)[kItems], T (&out)[kItems], T& total) {
    static T sums[kThreads];
    T own = 0;
    for (T item : in) own += item;
    sums[threadIdx.x] = own;
    __syncthreads();
    T before = 0;
    total = 0;
    for (int thread = 0; thread < kThreads; ++thread) {
      if (thread < static_cast<int>(threadIdx.x)) before += sums[thread];
      total += sums[thread];
    }
    for (int i = 0; i < kItems; ++i) {
      const T item = in[i];
      out[i] = before;
      before += item;
    }
    __syncthreads();
  }

  void ExclusiveSum(T (&in)[1], T (&out)[1], T& total) { ExclusiveSum<1>(in, out, total); }
};
}  // namespace cub
