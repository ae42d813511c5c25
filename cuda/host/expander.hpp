// One step of the beam search: the children of the beams, the hits among them, what stays of those.
#pragma once
#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <vector>

#include "child_ranges.hpp"
#include "flashtrie/search.cuh"
#include "label_search.hpp"
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
  const uint32_t* tokens;  // num_slots, as the log-probs
  const float* logprobs;
  uint64_t num_slots;
  uint32_t number;
  bool can_end;       // whether results are possible at this step
  float end_logprob;  // of the end of sequence at the next step; 0 where none is asked for
};

class Expander {
 public:
  Expander(const Trie& trie, const SearchParams& params)
      : opened_(trie),
        trie_(trie.view()),
        params_(params),
        beams_per_turn_(std::clamp(std::bit_floor(params.beam_width / 16), kLeastPerTurn, kMostPerTurn)) {}

  void begin_query() { results_.reset(params_.num_results); }
  // Leaves the best candidates of this step, and the best results of the query so far, in the two below.
  void expand(const Frontier& frontier, const Step& step);

  Top<Candidate>& candidates() { return candidates_; }
  Top<Result>& results() { return results_; }
  const Top<Result>& results() const { return results_; }

 private:
  static constexpr uint32_t kBeamsAhead = 64;  // whose children are looked for at once: enough that their reads overlap
  // Beams judged by the same floors: their reads overlap, and a branch foretold wrongly serves them all, but floors that
  // rise later find more in vain. A sixteenth of the beam width, within these.
  static constexpr uint32_t kLeastPerTurn = 8, kMostPerTurn = 32;
  static constexpr uint32_t kFewChildren = 32;  // up to so many are tested in one list with those of other beams
  static constexpr uint32_t kLabelsPerScan = 512;
  static constexpr uint32_t kMostMatches = kMostPerTurn * kFewChildren + kLabelsPerScan;

  // A match that may count, once its node's line says what it is.
  struct Pending {
    uint32_t child, beam, token;
    float score;
  };
  // What a score must reach to count at all. Scores as low as the lowest kept pass, though by its node such a child may
  // be worse: to tell that costs more than to sort it out later.
  struct Floors {
    float threshold, candidate, result, end_logprob, factor;
    bool admit(float score) const {
      return (score > threshold) & ((score >= candidate) | ((score + end_logprob) * factor >= result));
    }
  };

  void find_families(const Frontier& frontier, uint32_t begin, uint32_t end);
  void take_turn(const Frontier& frontier, const Step& step, uint32_t begin, uint32_t end);
  void ask_many(const Frontier& frontier, const Step& step, uint32_t beam, ChildRange children);
  void scan(const Frontier& frontier, const Step& step, uint32_t beam, ChildRange children);
  void search(const Frontier& frontier, const Step& step, uint32_t beam, ChildRange children, bool is_root);
  void run_search(const Frontier& frontier, const Step& step);
  Floors floors(const Step& step) const;
  void judge(const Frontier& frontier, const Step& step);
  void find_high_ranks();
  template <bool kHasHigh>
  uint32_t keep_pending(const Frontier& frontier, const Floors& floors);
  void route(const Step& step, uint32_t num_pending);

  const Trie& opened_;
  const TrieView trie_;
  const SearchParams params_;
  const uint32_t beams_per_turn_;  // a power of two
  const Scans scans_ = fastest_scans();
  const FindChildRanges find_child_ranges_ = find_child_ranges();
  StepRow row_;
  LabelSearch<false> low_search_;
  LabelSearch<true> high_search_;
  std::array<ChildRange, kBeamsAhead> ranges_;
  std::array<Match, kMostPerTurn * kFewChildren + 8> few_;
  std::array<uint32_t, kLabelsPerScan + kScanSlack> hits_;
  std::array<Match, kMostMatches> matches_;
  uint32_t num_matches_ = 0;
  std::array<uint32_t, kMostMatches> high_ranks_;
  std::array<Pending, kMostMatches> pending_;
  Top<Candidate> candidates_{kMostMatches};
  Top<Result> results_{kMostMatches};
};

}  // namespace flashtrie
