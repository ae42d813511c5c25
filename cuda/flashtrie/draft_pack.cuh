// Logits 16 bytes at a time on a GPU (nvcc only).
#pragma once
#include "draft_block.cuh"

#if defined(__CUDACC__) || defined(FT_EMULATION)
#if defined(__CUDACC__)
#include <cuda_bf16.h>
#endif

namespace flashtrie {

constexpr int kThreadLogits = 32;                           // of a tile, in registers
constexpr int kTileLogits = kThreadLogits * kDraftThreads;  // 8,192, whatever their type
static_assert(kTileLogits % (8 * kDraftThreads) == 0, "whole packs");

__device__ __forceinline__ uint32_t word_of(const uint4& raw, int i) {
  return i == 0 ? raw.x : i == 1 ? raw.y : i == 2 ? raw.z : raw.w;
}

// 16 bytes of logits of type T: each as float32, and the largest of them, which passes over NaN.
template <typename T>
struct Pack;

template <>
struct Pack<float> {
  static constexpr int kCount = 4, kLoads = kThreadLogits / kCount;
  static constexpr uint32_t kMinusInfinity = 0xff800000u;
  __device__ static float get(const uint4& raw, int i) { return __uint_as_float(word_of(raw, i)); }
  __device__ static float peak(const uint4& raw) {
    return fmaxf(fmaxf(get(raw, 0), get(raw, 1)), fmaxf(get(raw, 2), get(raw, 3)));
  }
};

template <>
struct Pack<Bfloat16> {
  static constexpr int kCount = 8, kLoads = kThreadLogits / kCount;
  static constexpr uint32_t kMinusInfinity = 0xff80ff80u;
  __device__ static float get(const uint4& raw, int i) {
    const uint32_t word = word_of(raw, i / 2);
    return __uint_as_float(i % 2 ? word & 0xffff0000u : word << 16);
  }
  __device__ static float peak(const uint4& raw) {
#if __CUDA_ARCH__ >= 800
    const __nv_bfloat162 pair = __hmax2(__hmax2(pair_of(raw.x), pair_of(raw.y)), __hmax2(pair_of(raw.z), pair_of(raw.w)));
    return fmaxf(__low2float(pair), __high2float(pair));
#else
    float peak = get(raw, 0);
    for (int i = 1; i < kCount; ++i) peak = fmaxf(peak, get(raw, i));
    return peak;
#endif
  }
  __device__ static __nv_bfloat162 pair_of(const uint32_t& word) {
    return reinterpret_cast<const __nv_bfloat162&>(word);
  }
};

template <>
struct Pack<__half> {
  static constexpr int kCount = 8, kLoads = kThreadLogits / kCount;
  static constexpr uint32_t kMinusInfinity = 0xfc00fc00u;
  __device__ static float get(const uint4& raw, int i) {
    const uint32_t word = word_of(raw, i / 2);
    return __half2float(__ushort_as_half(static_cast<unsigned short>(i % 2 ? word >> 16 : word & 0xffff)));
  }
  __device__ static float peak(const uint4& raw) {
#if __CUDA_ARCH__ >= 800
    const __half2 pair = __hmax2(__hmax2(pair_of(raw.x), pair_of(raw.y)), __hmax2(pair_of(raw.z), pair_of(raw.w)));
    return fmaxf(__low2float(pair), __high2float(pair));
#else
    float peak = get(raw, 0);
    for (int i = 1; i < kCount; ++i) peak = fmaxf(peak, get(raw, i));
    return peak;
#endif
  }
  __device__ static __half2 pair_of(const uint32_t& word) { return reinterpret_cast<const __half2&>(word); }
};

}  // namespace flashtrie
#endif
