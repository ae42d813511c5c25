#include "step_row.hpp"

#include <algorithm>

namespace flashtrie {

void StepRow::load(const TrieView& trie, const SearchParams& params, const uint32_t* tokens, const float* logprobs,
                   uint64_t num_slots) {
  for (uint32_t token : tokens_) bitmap_[(token & 0xffff) >> 5] = 0;
  for (uint32_t at : used_) table_[at].token = kNoToken;
  tokens_.clear();
  used_.clear();
  best_logprob_ = -INFINITY;
  int log2_size = 4;
  while ((uint64_t(1) << log2_size) < 4 * num_slots) ++log2_size;  // a quarter full, so probes are short
  if (log2_size > log2_size_) {
    log2_size_ = log2_size;
    mask_ = (1u << log2_size) - 1;
    table_.assign(size_t(1) << log2_size, Place());
  }
  for (uint64_t slot = 0; slot < num_slots; ++slot) {
    const uint32_t token = tokens[slot];
    const float logprob = logprobs[slot];
    if (!slot_extends(trie, params, token, logprob)) continue;
    best_logprob_ = std::max(best_logprob_, logprob);
    uint32_t at = token_hash(token, log2_size_);
    while (table_[at].token != kNoToken && table_[at].token != token) at = (at + 1) & mask_;
    if (table_[at].token == token) {
      table_[at].logprob = std::max(table_[at].logprob, logprob);
      continue;
    }
    table_[at] = {token, logprob};
    used_.push_back(at);
    tokens_.push_back(token);
    bitmap_[(token & 0xffff) >> 5] |= 1u << (token & 31);
  }
}

}  // namespace flashtrie
