// One step's proposals, laid out so that a child can ask: a bitmap over the low 16 bits of the tokens, and a
// small table from token to log-prob behind it.
#pragma once
#include <cstdint>
#include <vector>

#include "flashtrie/search.cuh"

namespace flashtrie {

class StepRow {
 public:
  StepRow() : bitmap_(kBitmapWords, 0) {}

  // Duplicates of a token count once, with their best log-prob. Costs num_slots, whatever the row before held.
  void load(const TrieView& trie, const SearchParams& params, const uint32_t* tokens, const float* logprobs,
            uint64_t num_slots);

  const uint32_t* bitmap() const { return bitmap_.data(); }
  const std::vector<uint32_t>& tokens() const { return tokens_; }  // distinct, in order of first slot

  float best_logprob() const { return best_logprob_; }  // -inf without proposals

  // The log-prob of a proposed token; false for a token that only shares its low half with one.
  bool find(uint32_t token, float* logprob) const {
    for (uint32_t at = token_hash(token, log2_size_);; at = (at + 1) & mask_) {
      if (table_[at].token == token) {
        *logprob = table_[at].logprob;
        return true;
      }
      if (table_[at].token == kNoToken) return false;
    }
  }

 private:
  struct Place {
    uint32_t token = kNoToken;
    float logprob = 0;
  };
  std::vector<uint32_t> bitmap_;
  std::vector<uint32_t> tokens_;
  std::vector<uint32_t> used_;  // places to clear before the next row
  std::vector<Place> table_;
  float best_logprob_ = -INFINITY;
  int log2_size_ = 0;
  uint32_t mask_ = 0;
};

}  // namespace flashtrie
