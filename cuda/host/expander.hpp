// One step of the beam search for some of the beams: their children, the hits among them, what stays of those.
#pragma once
#include <array>
#include <cstdint>
#include <vector>

#include "child_ranges.hpp"
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
  const uint32_t* tokens;  // num_slots proposals
  const float* logprobs;
  uint64_t num_slots;
  uint32_t number;
  bool can_end;       // whether results are possible at this step
  float end_logprob;  // of the end of sequence at the next step; 0 where none is asked for
};

class Expander {
 public:
  // Beams expanded between two looks at the floors; enough that their reads overlap.
  static constexpr uint32_t kBeamsPerTurn = 64;

  Expander(const Trie& trie, const SearchParams& params)
      : opened_(trie), trie_(trie.view()), params_(params) {}

  void begin_query() { results_.reset(params_.num_results); }
  void begin_step(const Step& step);
  // Beams [begin, end) of the frontier, kBeamsPerTurn at most. Candidates and results gather in the two below, the best
  // of each. False if neither these beams nor any behind them could add to those.
  bool expand(const Frontier& frontier, const Step& step, uint32_t begin, uint32_t end);

  Top<Candidate>& candidates() { return candidates_; }
  Top<Result>& results() { return results_; }
  const Top<Result>& results() const { return results_; }

 private:
  static constexpr uint32_t kLabelsPerScan = 1024;

  // The children of a beam. Those with a label above 16 bits stand last, and their high parts side by side.
  struct Family {
    ChildRange children;
    uint32_t first_high;
    uint64_t high_rank;  // of the first one's high part
  };
  // A hit that may count, once its node's line says what it is.
  struct Pending {
    uint64_t key;  // rank_key(score, child)
    float total;   // score, and the end of sequence where one is asked for
    uint32_t child, beam, token;
  };

  bool may_count(const Step& step, float score, uint32_t node) const;
  void find_families(const Frontier& frontier, uint32_t begin, uint32_t end);
  uint32_t label_of(const Family& family, uint32_t child) const;
  void scan(const Step& step, const Family& family, uint32_t beam, float score);
  void search(const Step& step, const Family& family, uint32_t beam, float score);
  void judge(const Step& step, uint32_t beam, uint32_t child, uint32_t token, float score);
  void route_pending(const Step& step);
  void route(const Step& step, const Pending& hit);

  const Trie& opened_;
  const TrieView trie_;
  const SearchParams params_;
  const ScanLabels scan_ = scan_labels();
  const FindChildRanges find_child_ranges_ = find_child_ranges();
  StepRow row_;
  std::array<ChildRange, kBeamsPerTurn> ranges_;  // of the beams at hand
  std::array<Family, kBeamsPerTurn> families_;
  std::array<uint32_t, kLabelsPerScan + kScanSlack> hits_;
  std::array<Pending, 32> pending_;
  size_t num_pending_ = 0;
  Top<Candidate> candidates_;
  Top<Result> results_;
};

}  // namespace flashtrie
