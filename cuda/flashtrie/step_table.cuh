// One step's proposals in shared memory, laid out so that a child can ask: a bitmap over the low 16 bits of the
// tokens, and behind it a table from token to log-prob. Two of them take turns, so that the row of step t + 1 is put in
// while step t is searched.
//
// The table chains the slots of a hash value. To put one in takes one exchange, whatever else is there, while a table with
// open addresses costs a warp as many turns as its unluckiest lane; and a token that stands twice needs no care, since
// whoever asks goes through the whole chain.
#pragma once
#include "search.cuh"
#include "simt.cuh"

namespace flashtrie {

struct StepTable {
  uint32_t* bitmap;     // kBitmapWords
  uint32_t* heads;      // 1 << log2_size: first slot of the chain, kNoToken where there is none
  uint32_t* tokens;     // by slot, as the next two
  float* logprobs;
  uint16_t* next;       // slot behind it in the chain, kNoNext where there is none
  int log2_size;

  static constexpr uint16_t kNoNext = 0xffff;
  static constexpr uint32_t kSlotBytes = 10;

  FT_DEVICE uint32_t size() const { return 1u << log2_size; }

  // Leaves the table empty; by `count` threads, of which this is the one at `place`. No barrier inside.
  FT_DEVICE void clear(uint32_t place, uint32_t count) const {
#pragma unroll 1
    for (uint32_t i = place; i < kBitmapWords / 4; i += count) reinterpret_cast<simt::Quad*>(bitmap)[i] = {0, 0, 0, 0};
#pragma unroll 1
    for (uint32_t i = place; i < size() / 4; i += count)
      reinterpret_cast<simt::Quad*>(heads)[i] = {kNoToken, kNoToken, kNoToken, kNoToken};
  }

  // Threads insert at once, each another slot.
  FT_DEVICE void insert(uint32_t token, float logprob, uint32_t slot) const {
    const uint32_t low = token & 0xffff;
    simt::atomic_or(&bitmap[low >> 5], 1u << (low & 31));
    tokens[slot] = token;
    logprobs[slot] = logprob;
    next[slot] = static_cast<uint16_t>(simt::atomic_exchange(&heads[token_hash(token, log2_size)], slot));
  }

  // The token's best log-prob, ordered, << 32, and the complement of the first slot with it; 0 for a token that only
  // shares its low half with one.
  FT_DEVICE uint64_t find(uint32_t token) const {
    uint64_t best = 0;
#pragma unroll 1
    for (uint32_t slot = heads[token_hash(token, log2_size)]; (slot & kNoNext) != kNoNext; slot = next[slot]) {
      const uint32_t there = tokens[slot];
      const uint64_t found = static_cast<uint64_t>(ordered_score(logprobs[slot])) << 32 | static_cast<uint32_t>(~slot);
      if (there == token && found > best) best = found;
    }
    return best;
  }

  FT_DEVICE static float logprob_of(uint64_t best) { return score_of(static_cast<uint32_t>(best >> 32)); }
  FT_DEVICE static uint32_t slot_of(uint64_t best) { return ~static_cast<uint32_t>(best); }
};

}  // namespace flashtrie
