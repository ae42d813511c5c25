#include "step_row.hpp"

#include <algorithm>

namespace flashtrie {
inline void StepRow::Insertion::insert(uint32_t token, float logprob) {
  const uint32_t mask = (1u << log2_size) - 1;
  uint32_t at = token_hash(token, log2_size);
  while (places[at].token != kNoToken && places[at].token != token) at = (at + 1) & mask;
  if (places[at].token == token) return;  // the better one came first
  places[at].token = token;
  places[at].logprob = logprob;
  uint32_t& word = bitmap[(token & 0xffff) >> 5];
  const uint32_t bit = 1u << (token & 31), before = word;
  word = before | bit;
  proposals[count].logprob = logprob;
  proposals[count].token = token;
  owns_bit[count] = (before & bit) == 0;
  ++count;
}

void StepRow::load(const TrieView& trie, const SearchParams& params, const uint32_t* tokens, const float* logprobs,
                   uint64_t num_slots) {
  log2_size_ = 4;
  while ((uint64_t(1) << log2_size_) < 4 * num_slots) ++log2_size_;  // a quarter full, so probes are short
  table_.resize(std::max(table_.size(), size_t(1) << log2_size_));
  proposals_.resize(num_slots);
  owns_bit_.resize(num_slots);
  if (!insert_falling(trie, params, tokens, logprobs, num_slots)) insert_sorted(trie, params, tokens, logprobs, num_slots);
  num_sieved_ = SIZE_MAX;  // of no use any more
}

bool StepRow::insert_falling(TrieView trie, SearchParams params, const uint32_t* tokens, const float* logprobs,
                             uint64_t num_slots) {
  Insertion row = begin();
  float last = INFINITY;
  for (uint64_t slot = 0; slot < num_slots; ++slot) {
    const uint32_t token = tokens[slot];
    const float logprob = logprobs[slot];
    if (!slot_extends(trie, params, token, logprob)) continue;
    if (logprob > last) return false;
    last = logprob;
    row.insert(token, logprob);
  }
  num_left_ = row.count;
  return true;
}

void StepRow::insert_sorted(const TrieView& trie, const SearchParams& params, const uint32_t* tokens,
                            const float* logprobs, uint64_t num_slots) {
  sorted_.clear();
  for (uint64_t slot = 0; slot < num_slots; ++slot)
    if (slot_extends(trie, params, tokens[slot], logprobs[slot])) sorted_.push_back({logprobs[slot], tokens[slot]});
  std::sort(sorted_.begin(), sorted_.end(), [](const Proposal& a, const Proposal& b) { return a.logprob > b.logprob; });
  Insertion row = begin();
  for (const Proposal& next : sorted_) row.insert(next.token, next.logprob);
  num_left_ = row.count;
}

void StepRow::make_sieve() {
  sieve_.clear();
  for (const Proposal& proposal : proposals()) sieve_.add(proposal.token);
  num_sieved_ = num_left_;
}

// Everything is cleared, since that costs less than to clear what is there: whole lines are written.
StepRow::Insertion StepRow::begin() {
  std::fill_n(table_.begin(), size_t(1) << log2_size_, Place());
  std::fill(bitmap_.begin(), bitmap_.end(), 0);
  return {table_.data(), bitmap_.data(), proposals_.data(), owns_bit_.data(), log2_size_};
}

}  // namespace flashtrie
