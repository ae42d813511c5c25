// One step's proposals in shared memory, laid out so that a child can ask: a bitmap over the low 16 bits of the
// tokens, and an open-addressing table from token to log-prob behind it. Two of them take turns, so that the row of
// step t + 1 is put in while step t is searched.
#pragma once
#include "search.cuh"
#include "simt.cuh"

namespace flashtrie {

struct StepTable {
  uint32_t* bitmap;  // kBitmapWords
  uint32_t* tokens;  // 1 << log2_size places; kNoToken where empty
  uint64_t* best;    // ordered_score of the best log-prob << 32, and the complement of the first slot with it; or 0
  int log2_size;

  FT_DEVICE uint32_t size() const { return 1u << log2_size; }

  // Leaves the table empty, by `num_threads` threads of which this is number `me`; no barrier inside.
  FT_DEVICE void clear(uint32_t me, uint32_t num_threads) const {
#pragma unroll 1
    for (uint32_t i = me; i < kBitmapWords; i += num_threads) bitmap[i] = 0;
#pragma unroll 1
    for (uint32_t i = me; i < size(); i += num_threads) {
      tokens[i] = kNoToken;
      best[i] = 0;
    }
  }

  // Threads insert at once. A token that comes twice counts once, with its best log-prob, in the first slot that has
  // it. That much is the same in every block of a group; which place a token gets is not.
  FT_DEVICE void insert(uint32_t token, float logprob, uint32_t slot) const {
    const uint32_t low = token & 0xffff;
    simt::atomic_or(&bitmap[low >> 5], 1u << (low & 31));
    uint32_t at = token_hash(token, log2_size);
#pragma unroll 1
    for (;;) {
      const uint32_t there = simt::atomic_cas(&tokens[at], kNoToken, token);
      if (there == kNoToken || there == token) break;
      at = (at + 1) & (size() - 1);
    }
    simt::atomic_max(&best[at], static_cast<uint64_t>(ordered_score(logprob)) << 32 | static_cast<uint32_t>(~slot));
  }

  // What stands at a token's place; 0 for a token that only shares its low half with one.
  FT_DEVICE uint64_t find(uint32_t token) const {
#pragma unroll 1
    for (uint32_t at = token_hash(token, log2_size);; at = (at + 1) & (size() - 1)) {
      const uint32_t there = tokens[at];
      if (there == token) return best[at];
      if (there == kNoToken) return 0;
    }
  }

  FT_DEVICE static float logprob_of(uint64_t best) { return score_of(static_cast<uint32_t>(best >> 32)); }
  FT_DEVICE static uint32_t slot_of(uint64_t best) { return ~static_cast<uint32_t>(best); }
};

}  // namespace flashtrie
