#include "scan.hpp"

#include "flashtrie/search.cuh"

#if defined(__x86_64__) && defined(__GNUC__)
#define FLASHTRIE_X86 1
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // false alarm inside GCC 12's own AVX-512 header
#include <immintrin.h>
#endif

namespace flashtrie {

uint64_t scan_labels_portable(const uint16_t* labels, uint64_t count, const uint32_t* bitmap, const Sieve&,
                              uint32_t first, uint32_t* hits) {
  uint64_t num_hits = 0;
  for (uint64_t i = 0; i < count; ++i) {  // branch-free: a hit stays by moving the end
    hits[num_hits] = first + static_cast<uint32_t>(i);
    num_hits += bitmap_test(bitmap, labels[i]);
  }
  return num_hits;
}

#if defined(FLASHTRIE_X86)
namespace {

__attribute__((target("avx512f,avx512bw,avx512vl"))) uint64_t scan_labels_avx512(
    const uint16_t* labels, uint64_t count, const uint32_t* bitmap, const Sieve&, uint32_t first, uint32_t* hits) {
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

// A gather takes a cycle a label; the sieve, held in registers, tests 32 labels in some fifteen. What falls through, few
// where few proposals are left, is asked of the bitmap, all together: a loop behind each 32 labels, whose length nobody
// foretells, made this slower than gathering. Brought 2 to 4 % of a query of the titles.
__attribute__((target("avx512f,avx512bw,avx512vl,avx512vbmi2"))) uint64_t scan_labels_vbmi2(
    const uint16_t* labels, uint64_t count, const uint32_t* bitmap, const Sieve& sieve, uint32_t first, uint32_t* hits) {
  alignas(64) static constexpr uint16_t kCounting[32] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                                                         16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31};
  const __m512i low_words = _mm512_load_si512(sieve.words), high_words = _mm512_load_si512(sieve.words + 32);
  const __m512i one = _mm512_set1_epi16(1), low_four = _mm512_set1_epi16(15), step = _mm512_set1_epi16(32);
  constexpr uint64_t kBlock = 512;
  uint16_t through[kBlock + 32];
  uint64_t num_hits = 0;
  for (uint64_t begin = 0; begin < count; begin += kBlock) {
    const uint64_t size = std::min(count - begin, kBlock);
    __m512i places = _mm512_load_si512(kCounting);
    uint64_t num_through = 0;
    for (uint64_t i = 0; i < size; i += 32) {
      const __mmask32 inside = size - i >= 32 ? 0xffffffffu : (1u << (size - i)) - 1;
      const __m512i label = _mm512_maskz_loadu_epi16(inside, labels + begin + i);
      const __m512i word = _mm512_permutex2var_epi16(low_words, label, high_words);  // by the lowest six bits
      const __m512i bit = _mm512_sllv_epi16(one, _mm512_and_si512(_mm512_srli_epi16(label, 6), low_four));
      const __mmask32 hit = _mm512_mask_test_epi16_mask(inside, word, bit);
      _mm512_storeu_si512(through + num_through, _mm512_maskz_compress_epi16(hit, places));
      num_through += static_cast<uint64_t>(__builtin_popcount(hit));
      places = _mm512_add_epi16(places, step);
    }
    for (uint64_t i = 0; i < num_through; ++i) {
      const uint64_t place = begin + through[i];
      hits[num_hits] = first + static_cast<uint32_t>(place);
      num_hits += bitmap_test(bitmap, labels[place]);
    }
  }
  return num_hits;
}

__attribute__((target("avx2,bmi"))) uint64_t scan_labels_avx2(const uint16_t* labels, uint64_t count,
                                                             const uint32_t* bitmap, const Sieve& sieve,
                                                             uint32_t first, uint32_t* hits) {
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
  return num_hits + scan_labels_portable(labels + i, count - i, bitmap, sieve, first + static_cast<uint32_t>(i),
                                         hits + num_hits);
}

}  // namespace
#endif

std::vector<NamedScan> all_scans() {
  std::vector<NamedScan> all = {{"portable", &scan_labels_portable}};
#if defined(FLASHTRIE_X86)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2")) all.push_back({"avx2", &scan_labels_avx2});
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")) {
    all.push_back({"avx512", &scan_labels_avx512});
    if (__builtin_cpu_supports("avx512vbmi2")) all.push_back({"vbmi2", &scan_labels_vbmi2});
  }
#endif
  return all;
}

Scans fastest_scans() {
  static const Scans fastest = [] {
    const std::vector<NamedScan> all = all_scans();  // the faster ones last
    const ScanLabels last = all.back().scan;
    return Scans{all.size() == 4 ? all[2].scan : last, last};
  }();
  return fastest;
}

}  // namespace flashtrie
