// What the two CPU baselines share: one step's proposals in order, the end-of-sequence rule, and the output.
#pragma once
#include <algorithm>
#include <vector>

#include "search.hpp"

namespace flashtrie {

// Distinct proposals of a step by ascending token, each with its best log-prob; two arrays, so that a merge reads
// tokens only. A sentinel above every label ends `tokens`.
struct SortedRow {
  std::vector<uint32_t> tokens;
  std::vector<float> logprobs;

  uint64_t size() const { return logprobs.size(); }

  void load(const TrieView& trie, const SearchParams& params, const uint32_t* row_tokens, const float* row_logprobs,
            uint64_t num_slots) {
    keys_.clear();
    for (uint64_t slot = 0; slot < num_slots; ++slot)
      if (slot_extends(trie, params, row_tokens[slot], row_logprobs[slot]))
        keys_.push_back(uint64_t(row_tokens[slot]) << 32 | static_cast<uint32_t>(~ordered_score(row_logprobs[slot])));
    std::sort(keys_.begin(), keys_.end());
    tokens.clear();
    logprobs.clear();
    for (uint64_t key : keys_) {
      const uint32_t token = static_cast<uint32_t>(key >> 32);
      if (!tokens.empty() && tokens.back() == token) continue;  // the best came first
      tokens.push_back(token);
      logprobs.push_back(score_of(~static_cast<uint32_t>(key)));
    }
    tokens.push_back(kNoToken);
  }

 private:
  std::vector<uint64_t> keys_;
};

// Whether keys may end at a step, and what the end adds to their score.
struct EndOfSequence {
  bool possible;
  float logprob;
};

inline EndOfSequence end_of_sequence(const SearchParams& params, const Grids& grids, uint64_t query, uint64_t step) {
  if (params.eos == kNoToken) return {true, 0.0f};
  EndOfSequence end{false, 0.0f};
  if (step + 1 == grids.num_steps) return end;
  const uint64_t begin = (query * grids.num_steps + step + 1) * grids.num_slots;
  for (uint64_t at = begin; at < begin + grids.num_slots; ++at) {
    if (!slot_ends(params, grids.tokens[at], grids.logprobs[at])) continue;
    end = {true, end.possible ? std::max(end.logprob, grids.logprobs[at]) : grids.logprobs[at]};
  }
  return end;
}

// The score of a key that ends here. Without an end of sequence nothing is added, not even a zero.
inline float ended_score(const SearchParams& params, const EndOfSequence& end, float score) {
  return params.eos == kNoToken ? score : score + end.logprob;
}

inline void append_hit(const Trie& trie, uint64_t key, float score, const std::vector<uint32_t>& tokens,
                       SearchOutput& to) {
  to.key_ids.push_back(key_id(trie.view(), key_node(key)));
  to.scores.push_back(score);
  to.normalised_scores.push_back(key_score(key));
  to.tokens.insert(to.tokens.end(), tokens.begin(), tokens.end());
  to.token_offsets.push_back(static_cast<int64_t>(to.tokens.size()));
}

}  // namespace flashtrie
