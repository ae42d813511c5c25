// Bit functions for g++ and nvcc alike. The zero case of each is defined here, because the
// instructions behind them differ on it.
#pragma once
#include <stdint.h>

#if defined(__CUDACC__)
#define FT_HD __host__ __device__ __forceinline__
#else
#define FT_HD inline
#endif

namespace flashtrie {

// Ones in x.
FT_HD int popcount64(uint64_t x) {
#if defined(__CUDA_ARCH__)
  return __popcll(x);
#else
  return __builtin_popcountll(x);
#endif
}

// Index of the lowest one, 64 for x = 0.
FT_HD int lowest_one64(uint64_t x) {
  if (x == 0) return 64;
#if defined(__CUDA_ARCH__)
  return __ffsll(static_cast<long long>(x)) - 1;
#else
  return __builtin_ctzll(x);
#endif
}

// Index of the k-th one (k from 0); x must have more than k ones.
FT_HD int select_one64(uint64_t x, int k) {
  int at = 0;
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int half = 32; half > 0; half >>= 1) {
    const int ones = popcount64(x & ((uint64_t(1) << half) - 1));
    if (k >= ones) {
      k -= ones;
      at += half;
      x >>= half;
    } else {
      x &= (uint64_t(1) << half) - 1;
    }
  }
  return at;
}

FT_HD bool test_bit(const uint64_t* words, uint64_t i) { return (words[i >> 6] >> (i & 63)) & 1; }

// Unsigned integer of `width` bits (1 to 32) at bit `i * width` of a packed array that ends with a spare word.
FT_HD uint32_t packed_get(const uint64_t* words, uint64_t i, int width) {
  const uint64_t bit = i * static_cast<uint64_t>(width);
  const uint64_t word = bit >> 6;
  const int shift = static_cast<int>(bit & 63);
  uint64_t value = words[word] >> shift;
#if defined(__CUDA_ARCH__)
  if (shift + width > 64) value |= words[word + 1] << (64 - shift);
#else
  value |= words[word + 1] << 1 << (63 - shift);  // where a value ends in the next word cannot be foretold
#endif
  return static_cast<uint32_t>(value & ((uint64_t(1) << width) - 1));
}

}  // namespace flashtrie
