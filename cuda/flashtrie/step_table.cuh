// One step's proposals in shared memory, laid out so that a child can ask: a bitmap over the low 16 bits of the
// tokens, and an open-addressing table from token to log-prob behind it. Two of them take turns, so that the row of
// step t + 1 is put in while step t is searched.
#pragma once
#include "search.cuh"
#include "simt.cuh"

namespace flashtrie {

struct StepTable {
  uint32_t* bitmap;     // kBitmapWords
  uint32_t* tokens;     // 1 << log2_size places; kNoToken where empty
  uint32_t* logprobs;   // ordered_score of the best log-prob; 0, less than any, where empty
  uint16_t* slots;      // a slot that holds the token
  int log2_size;

  FT_DEVICE uint32_t size() const { return 1u << log2_size; }

  // Leaves the table empty; all threads of the block, no barrier inside.
  FT_DEVICE void clear() const {
    for (uint32_t i = simt::thread(); i < kBitmapWords; i += simt::num_threads()) bitmap[i] = 0;
    for (uint32_t i = simt::thread(); i < size(); i += simt::num_threads()) {
      tokens[i] = kNoToken;
      logprobs[i] = 0;
    }
  }

  // Threads insert at once, in any order, with one outcome: a token that comes twice counts with its best log-prob.
  FT_DEVICE void insert(uint32_t token, float logprob, uint32_t slot) const {
    const uint32_t low = token & 0xffff;
    simt::atomic_or(&bitmap[low >> 5], 1u << (low & 31));
    uint32_t at = token_hash(token, log2_size);
    for (;;) {
      const uint32_t there = simt::atomic_cas(&tokens[at], kNoToken, token);
      if (there == kNoToken || there == token) break;
      at = (at + 1) & (size() - 1);
    }
    simt::atomic_max(&logprobs[at], ordered_score(logprob));
    slots[at] = static_cast<uint16_t>(slot);
  }

  // Place of a token, or kNoToken where it only shares its low half with one.
  FT_DEVICE uint32_t find(uint32_t token) const {
    for (uint32_t at = token_hash(token, log2_size);; at = (at + 1) & (size() - 1)) {
      const uint32_t there = tokens[at];
      if (there == token) return at;
      if (there == kNoToken) return kNoToken;
    }
  }
};

}  // namespace flashtrie
