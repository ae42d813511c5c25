// Collecting keyed entries and keeping the best n of them exactly, by a group of blocks.
//
// Every entry has a 64-bit rank key (score.cuh), all different, more is better. While entries are collected they are
// counted in a histogram over coarse score bins, so that afterwards the bin of the n-th best is known from one
// scan; the few entries in that bin settle the exact cut. No sort, and one outcome whatever the order of threads.
#pragma once
#include "score.cuh"
#include "simt.cuh"
#include "trie.cuh"

namespace flashtrie {

// Score bins: 128 for every power of two between -1/16 and -4096, where sums of log-probs lie; what lies outside
// falls into the first or the last bin, which costs time, never exactness.
constexpr int kBins = 2048;
constexpr int kBinWords = kBins / 2;  // two 16-bit counts a word
constexpr int kBinShift = 16;
constexpr uint32_t kLowestBin = 0x3a7fffffu >> kBinShift;  // ordered_score(-4096)
constexpr int kChunks = 32;            // one lane each
constexpr int kChunkWords = kBinWords / kChunks;
constexpr uint32_t kMaxTies = 256;

FT_HD uint32_t score_bin(uint64_t key) {
  const uint32_t prefix = static_cast<uint32_t>(key >> (32 + kBinShift));
  if (prefix < kLowestBin) return 0;
  const uint32_t bin = prefix - kLowestBin;
  return bin < kBins - 1 ? bin : kBins - 1;
}

// The least key that falls into a bin.
FT_HD uint64_t bin_start(uint32_t bin) {
  return bin == 0 ? 0 : static_cast<uint64_t>(bin + kLowestBin) << (32 + kBinShift);
}

// Keys, and beside each what its owner needs later. Parallel arrays, one behind the other.
struct CandidatePool {
  uint64_t* keys;
  uint32_t capacity;  // a multiple of 4, as that of the results

  static constexpr uint32_t kEntryBytes = 20;
  FT_HD ChildRange* ranges() const { return reinterpret_cast<ChildRange*>(keys + capacity); }
  FT_HD uint32_t* links() const { return reinterpret_cast<uint32_t*>(keys + 2 * capacity); }  // where it comes from
};

// A result's score before it is normalised, and where it comes from.
struct alignas(8) ResultScore {
  float total;
  uint32_t link;
};

struct ResultPool {
  uint64_t* keys;
  uint32_t capacity;

  static constexpr uint32_t kEntryBytes = 18;
  FT_HD ResultScore* scores() const { return reinterpret_cast<ResultScore*>(keys + capacity); }
  FT_HD uint16_t* depths() const { return reinterpret_cast<uint16_t*>(keys + 2 * capacity); }
};

constexpr uint32_t kCompareAll = 128;  // up to so many keys are each compared with all others

// Up to kCompareAll keys in the registers of a warp.
struct Comparison {
  uint64_t mine[kCompareAll / 32];

  FT_DEVICE Comparison(const uint64_t* keys, uint32_t count) {
#pragma unroll
    for (uint32_t i = 0; i < kCompareAll / 32; ++i) {
      const uint32_t at = 32 * i + simt::lane();
      mine[i] = at < count ? keys[at] : 0;
    }
  }
  FT_DEVICE uint32_t num_better(uint64_t key) const {
    uint32_t better = 0;
#pragma unroll
    for (uint32_t i = 0; i < kCompareAll / 32; ++i) better += simt::count_ones(simt::ballot(mine[i] > key));
    return better;
  }
};

// Where the n-th best lies.
struct BinCut {
  uint32_t bin;
  uint32_t wanted;   // so many of the bin are among the best n
  uint32_t in_bin;   // of so many
  bool all;          // there are no more than n entries: all are wanted
};

FT_DEVICE void count_in_bin(uint32_t* histogram, uint64_t key) {
  const uint32_t bin = score_bin(key);
  simt::atomic_add(&histogram[bin >> 1], 1u << (16 * (bin & 1)));
}

FT_DEVICE uint32_t inclusive_scan(uint32_t value) {
#pragma unroll
  for (uint32_t by = 1; by < 32; by <<= 1) {
    const uint32_t below = simt::shuffle_up(value, by);
    if (simt::lane() >= by) value += below;
  }
  return value;
}

// Where the n-th best lies, for a whole warp. `mine`: entries of chunk kChunks - 1 - lane; `word_of` gives a word of the
// histogram.
template <typename WordOf>
FT_DEVICE BinCut locate_cut(const WordOf& word_of, uint32_t mine, uint32_t n) {
  const uint32_t lane = simt::lane();
  BinCut cut{0, 0, 0, true};
  const uint32_t upto = inclusive_scan(mine);
  uint32_t votes = simt::ballot(upto > n);
  if (votes == 0) return cut;
  const uint32_t chunk_lane = simt::lowest_one(votes);
  const uint32_t wanted = n - simt::shuffle(upto - mine, chunk_lane);
  const uint32_t word_at = (kChunks - 1 - chunk_lane) * kChunkWords + kChunkWords - 1 - lane;
  const uint32_t word = word_of(word_at);
  const uint32_t pair = (word >> 16) + (word & 0xffff);
  const uint32_t pair_upto = inclusive_scan(pair);
  votes = simt::ballot(pair_upto > wanted);
  const uint32_t word_lane = simt::lowest_one(votes);
  const uint32_t left = wanted - simt::shuffle(pair_upto - pair, word_lane);
  const uint32_t found = simt::shuffle(word, word_lane);
  const uint32_t bin = 2 * simt::shuffle(word_at, word_lane);
  const uint32_t upper = found >> 16, lower = found & 0xffff;
  cut.all = false;
  if (left < upper) {
    cut.bin = bin + 1;
    cut.wanted = left;
    cut.in_bin = upper;
  } else {
    cut.bin = bin;
    cut.wanted = left - upper;
    cut.in_bin = lower;
  }
  return cut;
}

// A bin below which nothing is among the n best, by one warp while others still count: counts only grow, so what is
// read is at worst too low a bin.
FT_DEVICE uint32_t floor_bin(const uint32_t* histogram, uint32_t n) {
  const uint32_t lane = simt::lane();
  const uint32_t* chunk = histogram + (kChunks - 1 - lane) * kChunkWords;
  uint32_t mine = 0;
#pragma unroll 4
  for (uint32_t i = 0; i < kChunkWords; ++i) {
    const uint32_t word = chunk[(i + lane) % kChunkWords];  // each lane in another bank
    mine += (word & 0xffff) + (word >> 16);
  }
  const BinCut cut = locate_cut([&](uint32_t at) { return histogram[at]; }, mine, n);
  return cut.all ? 0 : cut.wanted == 0 ? cut.bin + 1 : cut.bin;
}

}  // namespace flashtrie
