#include <chrono>

#include "baseline_common.hpp"
#include "baselines.hpp"

namespace flashtrie {
namespace {

// A kept or found prefix: its tokens, and no state of the trie.
struct Prefix {
  uint64_t key;  // rank key by which it is pruned
  float score;
  std::vector<uint32_t> tokens;
};

bool better(const Prefix& a, const Prefix& b) { return a.key > b.key; }

// Node of a prefix extended by one token, from the root.
uint32_t descend(const TrieView& trie, const std::vector<uint32_t>& tokens, uint32_t last) {
  uint32_t node = 0;
  for (size_t depth = 0; depth <= tokens.size(); ++depth) {
    node = find_child(trie, child_range(trie, node), depth < tokens.size() ? tokens[depth] : last);
    if (node == kNoNode) return kNoNode;
  }
  return node;
}

Prefix extended(const Prefix& beam, uint32_t token, uint64_t key, float score) {
  Prefix longer{key, score, beam.tokens};
  longer.tokens.push_back(token);
  return longer;
}

void keep_best(std::vector<Prefix>& items, uint64_t limit) {
  const uint64_t count = std::min<uint64_t>(limit, items.size());
  std::partial_sort(items.begin(), items.begin() + static_cast<int64_t>(count), items.end(), better);
  items.erase(items.begin() + static_cast<int64_t>(count), items.end());
}

std::vector<Prefix> search_one(const TrieView& trie, const Grids& grids, const SearchParams& params, uint64_t query) {
  std::vector<Prefix> beams{{0, 0.0f, {}}}, next, results;
  SortedRow row;
  for (uint64_t step = 0; step < grids.num_steps && !beams.empty(); ++step) {
    const uint64_t slot = (query * grids.num_steps + step) * grids.num_slots;
    row.load(trie, params, grids.tokens + slot, grids.logprobs + slot, grids.num_slots);
    const EndOfSequence end = end_of_sequence(params, grids, query, step);
    const float factor = params.length_factors[step + 1];
    next.clear();
    for (const Prefix& beam : beams) {
      for (uint64_t i = 0; i < row.size(); ++i) {
        const uint32_t token = row.tokens[i];
        const float score = beam.score + row.logprobs[i];
        if (!(score > params.sequence_threshold)) continue;
        const uint32_t node = descend(trie, beam.tokens, token);  // is it a prefix of a key?
        if (node == kNoNode) continue;
        const uint32_t found = descend(trie, beam.tokens, token);  // is it a key?
        if (end.possible && is_terminal(trie, found)) {
          const float total = ended_score(params, end, score);
          results.push_back(extended(beam, token, rank_key(total * factor, found), total));
        }
        if (!is_leaf(trie, node)) next.push_back(extended(beam, token, rank_key(score, node), score));
      }
    }
    keep_best(next, params.beam_width);
    beams.swap(next);
  }
  keep_best(results, params.num_results);
  return results;
}

}  // namespace

SearchOutput search_marisa_int(const Trie& trie, const Grids& grids, const SearchParams& params) {
  SearchOutput output;
  output.hit_offsets.push_back(0);
  output.token_offsets.push_back(0);
  for (uint64_t query = 0; query < grids.num_queries; ++query) {
    const auto start = std::chrono::steady_clock::now();
    for (const Prefix& result : search_one(trie.view(), grids, params, query))
      append_hit(trie, result.key, result.score, result.tokens, output);
    output.hit_offsets.push_back(static_cast<int64_t>(output.key_ids.size()));
    output.query_ns.push_back(std::chrono::nanoseconds(std::chrono::steady_clock::now() - start).count());
  }
  return output;
}

}  // namespace flashtrie
