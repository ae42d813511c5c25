// The growing tree of one batch row, and its way into the output arrays.
#pragma once
#include <cstdint>
#include <vector>

#include "draft.hpp"

namespace flashtrie {

struct DraftCandidate {
  float log_prob;
  uint32_t id;     // in the drafter's vocabulary
  uint32_t state;  // trie node, or kNoNode
};

// What a node may offer, best first.
struct DraftOffers {
  const DraftCandidate* candidates = nullptr;
  int32_t count = 0;
  bool has_more = false;  // more tokens are legal than top_k
};

struct DraftNode {
  float score;
  int32_t token;
  int32_t depth;
  int32_t parent;
  uint32_t state;
  int32_t num_taken;
  DraftOffers offers;
};

class DraftTree {
 public:
  explicit DraftTree(const DraftSizes& sizes) : sizes_(sizes) {}

  // Grow from a root; `offers_of(node)` gives the candidates of a node less deep than num_depths.
  template <typename OffersOf>
  void grow(int32_t root, uint32_t state, OffersOf&& offers_of) {
    nodes_.clear();
    frontier_.clear();
    append({0.0f, root, 0, -1, state, 0, {}}, offers_of);
    while (!frontier_.empty() && nodes_.size() < static_cast<size_t>(sizes_.num_nodes)) {
      const uint32_t index = pop_best();
      const DraftNode& parent = nodes_[index];
      const DraftCandidate& best = parent.offers.candidates[parent.num_taken];
      const DraftNode child{parent.score + best.log_prob, static_cast<int32_t>(best.id), parent.depth + 1,
                            static_cast<int32_t>(index),  best.state,                    0,
                            {}};
      ++nodes_[index].num_taken;
      append(child, offers_of);
      offer(index);
    }
  }

  // Whether some node has all its top_k children in the tree although more tokens were legal.
  bool is_truncated() const;
  // Write every element of one batch row. `vocab_map` may be null.
  void write(const DraftOutputs& out, int64_t batch, int32_t base_length, const int32_t* vocab_map, int32_t status);

 private:
  template <typename OffersOf>
  void append(const DraftNode& node, OffersOf& offers_of) {
    nodes_.push_back(node);
    if (node.depth == sizes_.num_depths()) return;
    nodes_.back().offers = offers_of(node);
    offer(static_cast<uint32_t>(nodes_.size() - 1));
  }
  void offer(uint32_t index);
  uint32_t pop_best();
  void write_masks(const DraftOutputs& out, int64_t batch);

  DraftSizes sizes_;
  std::vector<DraftNode> nodes_;
  std::vector<uint64_t> frontier_;  // heap of rank keys (offered score, offering node)
};

}  // namespace flashtrie
