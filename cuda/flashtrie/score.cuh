// How candidates and results are ordered: by float32 score descending, then node id ascending, as one
// unsigned 64-bit key in which more is better. No order depends on threads or engines.
#pragma once
#include "bits.cuh"

#if !defined(__CUDA_ARCH__)
#include <math.h>
#include <string.h>
#endif

namespace flashtrie {

FT_HD uint32_t float_bits(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
#endif
}

FT_HD float bits_float(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
#endif
}

// Unsigned integers in the order of the floats; -0 counts as +0. NaN must not come here.
FT_HD uint32_t ordered_score(float score) {
  const uint32_t bits = float_bits(score + 0.0f);
  return bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
}

FT_HD float score_of(uint32_t ordered) {
  return bits_float(ordered & 0x80000000u ? ordered ^ 0x80000000u : ~ordered);
}

FT_HD uint64_t rank_key(float score, uint32_t node) {
  return (static_cast<uint64_t>(ordered_score(score)) << 32) | static_cast<uint32_t>(~node);
}

FT_HD uint32_t key_node(uint64_t key) { return ~static_cast<uint32_t>(key); }
FT_HD float key_score(uint64_t key) { return score_of(static_cast<uint32_t>(key >> 32)); }

}  // namespace flashtrie
