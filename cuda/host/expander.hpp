// One step of the beam search: the children of the beams, the hits among them, what stays of those.
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
  const uint32_t* tokens;  // num_slots, as the log-probs
  const float* logprobs;
  uint64_t num_slots;
  uint32_t number;
  bool can_end;       // whether results are possible at this step
  float end_logprob;  // of the end of sequence at the next step; 0 where none is asked for
};

class Expander {
 public:
  Expander(const Trie& trie, const SearchParams& params) : opened_(trie), trie_(trie.view()), params_(params) {}

  void begin_query() { results_.reset(params_.num_results); }
  // Leaves the best candidates of this step, and the best results of the query so far, in the two below.
  void expand(const Frontier& frontier, const Step& step);

  Top<Candidate>& candidates() { return candidates_; }
  Top<Result>& results() { return results_; }
  const Top<Result>& results() const { return results_; }

 private:
  static constexpr uint32_t kBeamsAhead = 64;  // whose children are looked for at once: enough that their reads overlap
  static constexpr uint32_t kLabelsPerScan = 1024;
  static constexpr uint32_t kMostPending = 32;

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

  void find_families(const Frontier& frontier, uint32_t begin, uint32_t end);
  uint32_t label_of(const Family& family, uint32_t child) const;
  uint32_t find(const Family& family, ChildRange part, uint32_t token) const;
  void scan(const Step& step, const Family& family, uint32_t beam, float score);
  void search(const Step& step, const Family& family, uint32_t beam, float score);
  void search_root(const Step& step, const Family& family, uint32_t beam, float score);
  bool may_count(const Step& step, float score, uint32_t node) const;
  void judge(const Step& step, uint32_t beam, uint32_t child, uint32_t token, float score);
  void route_pending(const Step& step);
  void route(const Step& step, const Pending& hit);

  const Trie& opened_;
  const TrieView trie_;
  const SearchParams params_;
  const ScanLabels scan_ = scan_labels();
  const FindChildRanges find_child_ranges_ = find_child_ranges();
  StepRow row_;
  std::array<ChildRange, kBeamsAhead> ranges_;
  std::array<Family, kBeamsAhead> families_;
  std::array<uint32_t, kLabelsPerScan + kScanSlack> hits_;
  std::array<Pending, kMostPending> pending_;
  size_t num_pending_ = 0;
  Top<Candidate> candidates_;
  Top<Result> results_;
};

}  // namespace flashtrie
