// One step of the beam search for some of the beams: their children, the hits among them, what stays of those.
#pragma once
#include <cstdint>
#include <vector>

#include "flashtrie/search.cuh"
#include "scan.hpp"
#include "step_row.hpp"
#include "top.hpp"
#include "trie.hpp"

namespace flashtrie {

struct Candidate {
  uint64_t key;     // rank_key(score, node)
  uint32_t parent;  // place in the frontier it was expanded from
  uint32_t token;
};

struct Result {
  uint64_t key;  // rank_key(normalised score, node)
  float score;
  uint32_t depth;   // number of tokens
  uint32_t parent;  // place in the frontier of step depth - 1
  uint32_t token;
};

// The beams alive before a step, best first.
struct Frontier {
  std::vector<uint32_t> nodes;
  std::vector<float> scores;
};

// What all beams of a step share.
struct Step {
  const StepRow* row;
  uint32_t number;
  bool can_end;       // whether results are possible at this step
  float end_logprob;  // of the end of sequence at the next step; 0 where none is asked for
};

class Expander {
 public:
  Expander(const Trie& trie, const SearchParams& params)
      : opened_(trie), trie_(trie.view()), params_(params), scan_(scan_labels()) {}

  void begin_query() { results_.reset(params_.num_results); }
  void begin_step() { candidates_.reset(params_.beam_width); }
  // Whether a beam, or any behind it, could still give a candidate or a result that stays here.
  bool may_contribute(const Frontier& frontier, const Step& step, uint32_t beam) const;
  // Beams [begin, end) of the frontier. Candidates and results gather in the two below, the best of each.
  void expand(const Frontier& frontier, const Step& step, uint32_t begin, uint32_t end);

  Top<Candidate>& candidates() { return candidates_; }
  Top<Result>& results() { return results_; }
  const Top<Result>& results() const { return results_; }

 private:
  // A hit that may count, once its node's line says what it is.
  struct Pending {
    uint64_t key;  // rank_key(score, child)
    float total;   // score, and the end of sequence where one is asked for
    uint32_t child, beam, token;
  };

  void find_ranges(const Frontier& frontier, uint32_t begin, uint32_t end);
  void find_hits(const StepRow& row, uint32_t begin, uint32_t end);
  void search_wide(const StepRow& row, ChildRange range);
  void judge_hits(const Frontier& frontier, const Step& step);
  void route(const Step& step, const Pending& hit);

  const Trie& opened_;
  const TrieView trie_;
  const SearchParams params_;
  const ScanLabels scan_;
  std::vector<ChildRange> ranges_;  // of the beams at hand
  std::vector<uint32_t> hit_children_, hit_beams_;
  uint64_t num_hits_ = 0;
  std::vector<Pending> pending_;
  Top<Candidate> candidates_;
  Top<Result> results_;
};

}  // namespace flashtrie
