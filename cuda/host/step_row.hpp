// One step's proposals, laid out so that a child can ask: a bitmap over the low 16 bits of the tokens, and a
// small table from token to log-prob behind it. Best first, so that the worst can be forgotten as the floors rise.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "flashtrie/search.cuh"

namespace flashtrie {

struct Proposal {
  float logprob;
  uint32_t token;
  uint32_t place;      // in the table
  bool owns_bit;       // no better proposal set the bit of its low half
};

class StepRow {
 public:
  StepRow() : bitmap_(kBitmapWords, 0) {}

  // Duplicates of a token count once, with their best log-prob. Costs num_slots, whatever the row before held, where
  // log-probs do not ascend; else sorting them besides.
  void load(const TrieView& trie, const SearchParams& params, const uint32_t* tokens, const float* logprobs,
            uint64_t num_slots);

  // Forgets the worst proposals, up to one whose log-prob `reaches`. False if none is left.
  template <typename Reaches>
  bool keep(const Reaches& reaches) {
    for (; num_left_ > 0; --num_left_) {
      const Proposal& worst = proposals_[num_left_ - 1];
      if (reaches(worst.logprob)) return true;
      if (worst.owns_bit) bitmap_[(worst.token & 0xffff) >> 5] &= ~(1u << (worst.token & 31));
    }
    return false;
  }

  const uint32_t* bitmap() const { return bitmap_.data(); }
  std::span<const Proposal> proposals() const { return {proposals_.data(), num_left_}; }  // distinct, best first

  // The log-prob of a proposed token, forgotten or not; -inf for one that only shares its low half with such.
  float find(uint32_t token) const {
    for (uint32_t at = token_hash(token, log2_size_);; at = (at + 1) & mask_) {
      if (table_[at].token == token) return table_[at].logprob;
      if (table_[at].token == kNoToken) return -INFINITY;
    }
  }

 private:
  struct Place {
    uint32_t token = kNoToken;
    float logprob = 0;
  };
  void clear();

  std::vector<uint32_t> bitmap_;
  std::vector<Proposal> proposals_;
  size_t num_left_ = 0;
  std::vector<Place> table_;
  int log2_size_ = 0;
  uint32_t mask_ = 0;
};

}  // namespace flashtrie
