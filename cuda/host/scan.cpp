#include "scan.hpp"

#include "flashtrie/search.cuh"

#if defined(__x86_64__) && defined(__GNUC__)
#define FLASHTRIE_X86 1
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // false alarm inside GCC 12's own AVX-512 header
#include <immintrin.h>
#endif

namespace flashtrie {

uint64_t scan_labels_portable(const uint16_t* labels, uint64_t count, const uint32_t* bitmap, uint32_t first,
                              uint32_t* hits) {
  uint64_t num_hits = 0;
  for (uint64_t i = 0; i < count; ++i) {  // branch-free: a hit stays by moving the end
    hits[num_hits] = first + static_cast<uint32_t>(i);
    num_hits += bitmap_test(bitmap, labels[i]);
  }
  return num_hits;
}

#if defined(FLASHTRIE_X86)
namespace {

__attribute__((target("avx512f,avx512bw,avx512vl"))) uint64_t scan_labels_avx512(const uint16_t* labels,
                                                                                uint64_t count,
                                                                                const uint32_t* bitmap,
                                                                                uint32_t first, uint32_t* hits) {
  const __m512i one = _mm512_set1_epi32(1), low_five = _mm512_set1_epi32(31);
  __m512i ids = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(first)),
                                 _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0));
  uint64_t num_hits = 0;
  for (uint64_t i = 0; i < count; i += 16) {
    const __mmask16 inside = count - i >= 16 ? 0xffff : static_cast<__mmask16>((1u << (count - i)) - 1);
    const __m512i label = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(inside, labels + i));
    const __m512i word = _mm512_i32gather_epi32(_mm512_srli_epi32(label, 5), bitmap, 4);
    const __m512i bit = _mm512_sllv_epi32(one, _mm512_and_si512(label, low_five));
    const __mmask16 hit = _mm512_mask_test_epi32_mask(inside, word, bit);
    _mm512_storeu_si512(hits + num_hits, _mm512_maskz_compress_epi32(hit, ids));
    num_hits += static_cast<uint64_t>(__builtin_popcount(hit));
    ids = _mm512_add_epi32(ids, _mm512_set1_epi32(16));
  }
  return num_hits;
}

__attribute__((target("avx2,bmi"))) uint64_t scan_labels_avx2(const uint16_t* labels, uint64_t count,
                                                             const uint32_t* bitmap, uint32_t first,
                                                             uint32_t* hits) {
  const __m256i one = _mm256_set1_epi32(1), low_five = _mm256_set1_epi32(31);
  uint64_t num_hits = 0, i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m256i label =
        _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(labels + i)));
    const __m256i word = _mm256_i32gather_epi32(reinterpret_cast<const int*>(bitmap), _mm256_srli_epi32(label, 5), 4);
    const __m256i bit = _mm256_sllv_epi32(one, _mm256_and_si256(label, low_five));
    const __m256i miss = _mm256_cmpeq_epi32(_mm256_and_si256(word, bit), _mm256_setzero_si256());
    unsigned hit = ~static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(miss))) & 0xff;
    for (; hit != 0; hit &= hit - 1)
      hits[num_hits++] = first + static_cast<uint32_t>(i) + static_cast<uint32_t>(__builtin_ctz(hit));
  }
  return num_hits + scan_labels_portable(labels + i, count - i, bitmap, first + static_cast<uint32_t>(i),
                                         hits + num_hits);
}

}  // namespace
#endif

ScanLabels scan_labels() {
#if defined(FLASHTRIE_X86)
  static const ScanLabels best = [] {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")) return &scan_labels_avx512;
    if (__builtin_cpu_supports("avx2")) return &scan_labels_avx2;
    return &scan_labels_portable;
  }();
  return best;
#else
  return &scan_labels_portable;
#endif
}

}  // namespace flashtrie
