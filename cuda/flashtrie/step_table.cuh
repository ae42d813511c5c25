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
  uint64_t* best;    // ordered_score of the best log-prob << 32, and the complement of the first slot with it
  int log2_size;

  FT_DEVICE uint32_t size() const { return 1u << log2_size; }

  // Leaves the table empty; all threads of the block, no barrier inside.
  FT_DEVICE void clear() const {
#pragma unroll 1
    for (uint32_t i = simt::thread(); i < kBitmapWords / 4; i += simt::num_threads())
      reinterpret_cast<simt::Quad*>(bitmap)[i] = {0, 0, 0, 0};
#pragma unroll 1
    for (uint32_t i = simt::thread(); i < size() / 4; i += simt::num_threads())
      reinterpret_cast<simt::Quad*>(tokens)[i] = {kNoToken, kNoToken, kNoToken, kNoToken};
  }

  // Threads insert at once. False where another slot has put in the same token already: then nothing is done, and the
  // slot must be settled by `repeat` when all have been inserted. Which place a token gets may differ from block to
  // block, what stands there in the end does not.
  FT_DEVICE bool insert(uint32_t token, float logprob, uint32_t slot) const {
    const uint32_t low = token & 0xffff;
    simt::atomic_or(&bitmap[low >> 5], 1u << (low & 31));
    uint32_t at = token_hash(token, log2_size);
#pragma unroll 1
    for (;;) {
      const uint32_t there = simt::atomic_cas(&tokens[at], kNoToken, token);
      if (there == token) return false;
      if (there == kNoToken) break;
      at = (at + 1) & (size() - 1);
    }
    best[at] = entry(logprob, slot);
    return true;
  }

  // A token that comes twice counts once, with its best log-prob, in the first slot that has that.
  FT_DEVICE void repeat(uint32_t token, float logprob, uint32_t slot) const {
    uint32_t at = token_hash(token, log2_size);
#pragma unroll 1
    while (tokens[at] != token) at = (at + 1) & (size() - 1);
    simt::atomic_max(&best[at], entry(logprob, slot));
  }

  // What stands at a token's place; 0 for a token that only shares its low half with one.
  FT_DEVICE uint64_t find(uint32_t token) const {
#pragma unroll 1
    for (uint32_t at = token_hash(token, log2_size);; at = (at + 1) & (size() - 1)) {
      const uint32_t there = tokens[at];
      const uint64_t entry = best[at];  // side by side with the token, whatever it says
      if (there == token) return entry;
      if (there == kNoToken) return 0;
    }
  }

  FT_DEVICE static uint64_t entry(float logprob, uint32_t slot) {
    return static_cast<uint64_t>(ordered_score(logprob)) << 32 | static_cast<uint32_t>(~slot);
  }
  FT_DEVICE static float logprob_of(uint64_t best) { return score_of(static_cast<uint32_t>(best >> 32)); }
  FT_DEVICE static uint32_t slot_of(uint64_t best) { return ~static_cast<uint32_t>(best); }
};

}  // namespace flashtrie
