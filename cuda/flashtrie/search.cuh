// The steps of the trie-constrained beam search: what a slot, a candidate and a result are. Engines differ in
// how they schedule these, never in what they mean. Order and ties: score.cuh.
#pragma once
#include "score.cuh"
#include "trie.cuh"

namespace flashtrie {

constexpr uint32_t kMaxToken = 0x7fffffffu;
constexpr int kBitmapWords = 65536 / 32;  // one bit for every low half of a token
constexpr uint32_t kNoToken = 0xffffffffu;

// What holds for every query of a batch.
struct SearchParams {
  float token_threshold;
  float sequence_threshold;
  uint32_t beam_width;
  uint32_t num_results;
  uint32_t padding;              // token of an empty slot
  uint32_t eos;                  // kNoToken: results need no end of sequence
  const float* length_factors;   // num_steps + 1; by number of tokens
};

// A slot that can extend a beam: not empty, above the threshold, and a token that the index can hold at all.
FT_HD bool slot_extends(const TrieView& trie, const SearchParams& params, uint32_t token, float logprob) {
  return token != params.padding && token <= (trie.high_width > 0 ? kMaxToken : 0xffffu) &&
         logprob > params.token_threshold && logprob > -INFINITY;
}

// A slot in which the end of sequence is proposed. No threshold applies: it labels no edge.
FT_HD bool slot_ends(const SearchParams& params, uint32_t token, float logprob) {
  return token == params.eos && token != params.padding && logprob > -INFINITY;
}

FT_HD bool bitmap_test(const uint32_t* bitmap, uint32_t low) { return (bitmap[low >> 5] >> (low & 31)) & 1; }

// Home of a token in a table of a power of two places, given that power.
FT_HD uint32_t token_hash(uint32_t token, int log2_size) { return (token * 0x9e3779b1u) >> (32 - log2_size); }

}  // namespace flashtrie
