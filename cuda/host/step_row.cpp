#include "step_row.hpp"

#include <algorithm>

namespace flashtrie {

void StepRow::clear() {
  for (const Proposal& proposal : proposals_) {
    bitmap_[(proposal.token & 0xffff) >> 5] = 0;
    table_[proposal.place].token = kNoToken;
  }
  proposals_.clear();
}

void StepRow::load(const TrieView& trie, const SearchParams& params, const uint32_t* tokens, const float* logprobs,
                   uint64_t num_slots) {
  clear();
  int log2_size = 4;
  while ((uint64_t(1) << log2_size) < 4 * num_slots) ++log2_size;  // a quarter full, so probes are short
  if (log2_size > log2_size_) {
    log2_size_ = log2_size;
    mask_ = (1u << log2_size) - 1;
    table_.assign(size_t(1) << log2_size, Place());
  }
  for (uint64_t slot = 0; slot < num_slots; ++slot)
    if (slot_extends(trie, params, tokens[slot], logprobs[slot]))
      proposals_.push_back({logprobs[slot], tokens[slot], 0, true});
  auto better = [](const Proposal& a, const Proposal& b) { return a.logprob > b.logprob; };
  if (!std::is_sorted(proposals_.begin(), proposals_.end(), better))
    std::sort(proposals_.begin(), proposals_.end(), better);

  num_left_ = 0;
  for (const Proposal& next : proposals_) {
    const uint32_t token = next.token;
    uint32_t at = token_hash(token, log2_size_);
    while (table_[at].token != kNoToken && table_[at].token != token) at = (at + 1) & mask_;
    if (table_[at].token == token) continue;  // the better one came first
    table_[at] = {token, next.logprob};
    uint32_t& word = bitmap_[(token & 0xffff) >> 5];
    const uint32_t bit = 1u << (token & 31);
    proposals_[num_left_++] = {next.logprob, token, at, (word & bit) == 0};
    word |= bit;
  }
  proposals_.resize(num_left_);
}

}  // namespace flashtrie
