// Draft trees: sizes, outputs and the rules that the C++ engine and the kernels share.
//
// Growth (DDTree, arXiv 2604.12989): every node of the tree offers its best child that is not yet in it; the best
// offer is appended until the tree is full or nobody offers.
//   order of offers      score descending, then parent index ascending
//   order of candidates  logit descending, then token id ascending; only finite logits
//   score                float32, score(parent) + min(logit - lse, 0), summed from the root on
// The log-sum-exp of a row may differ between engines by a unit in the last place; everything else is exact.
#pragma once
#include "score.cuh"
#include "trie.cuh"

namespace flashtrie {

enum LogitType : int32_t { kFloat32 = 0, kFloat16 = 1, kBfloat16 = 2 };

constexpr int32_t kDraftBadRow = 1;     // a row that was read holds NaN or +inf
constexpr int32_t kDraftTruncated = 2;  // a node has all its top_k children in the tree, more tokens were legal

struct DraftSizes {
  int64_t batch_size;
  int64_t block_size;  // rows a batch row has in the logits
  int32_t vocab_size;
  int32_t num_nodes;   // the root included
  int32_t top_k;
  int32_t first_row;   // the row that scores depth 1
  int32_t self_padding;
  int32_t logit_type;

  // Depths below the root that can hold a node; deeper rows are never read.
  FT_HD int32_t num_depths() const {
    return static_cast<int32_t>(block_size < num_nodes ? block_size : static_cast<int64_t>(num_nodes)) - 1;
  }
  FT_HD int32_t mask_words() const { return (num_nodes + 31) / 32; }
};

// Where the results go: B batch rows, N nodes, W = ceil(N / 32); every element is written by every build.
struct DraftOutputs {
  int32_t* node_token_ids;        // [B, N]
  int32_t* node_depths;           // [B, N]
  int32_t* parent_ids;            // [B, N]
  float* node_scores;             // [B, N]
  int32_t* valid_counts;          // [B]
  int32_t* verify_token_ids;      // [B, N]
  int32_t* verify_position_ids;   // [B, N]
  int32_t* packed_ancestor_mask;  // [B, N, W]
  int8_t* ancestor_mask;          // [B, N, N]
  int32_t* context_lengths;       // [B]
  int64_t* select_token_indices;  // [B, N]
  int32_t* status;                // [B]
  uint32_t* node_states;          // [B, N], or null without a constraint
};

// A token trie that the tree must not leave.
struct DraftConstraint {
  TrieView trie;
  const uint32_t* start_states;  // [B], or null: the trie's root
  int64_t end_token;             // legal where a key ends; -1: keys end without a token
  int32_t renormalise;           // over each node's legal tokens, instead of the whole vocabulary
};

FT_HD float child_log_prob(float logit, float lse) {
  const float difference = logit - lse;
  return difference < 0.0f ? difference : 0.0f;
}

// Neither NaN nor +inf.
FT_HD bool is_good_logit(float x) { return x < __builtin_inff(); }

// The legal tokens of one trie state in ascending order, numbered from 0: its children, and where a key ends the
// end token at its place among them.
struct LegalTokens {
  ChildRange children;
  uint32_t end_rank;  // number of the end token, or kNoNode where it is not legal
  uint32_t end_token;

  FT_HD uint32_t count() const { return children.fan_out() + (end_rank != kNoNode ? 1 : 0); }

  // Child of the i-th legal token, kNoNode for the end token.
  FT_HD uint32_t state(uint32_t i) const {
    if (i == end_rank) return kNoNode;
    return children.first + i - (i > end_rank ? 1 : 0);
  }

  FT_HD uint32_t token(const TrieView& trie, uint32_t i) const {
    const uint32_t child = state(i);
    return child == kNoNode ? end_token : label(trie, child);
  }
};

FT_HD LegalTokens legal_tokens(const TrieView& trie, uint32_t node, int64_t end_token) {
  LegalTokens legal{{0, 0}, kNoNode, 0};
  if (node == kNoNode) return legal;
  legal.children = child_range(trie, node);
  if (end_token < 0 || !is_terminal(trie, node)) return legal;
  uint32_t low = legal.children.first, high = legal.children.last;
  while (low < high) {
    const uint32_t middle = low + ((high - low) >> 1);
    if (label(trie, middle) < static_cast<uint32_t>(end_token))
      low = middle + 1;
    else
      high = middle;
  }
  // A child with that very label keeps its own state.
  if (low < legal.children.last && label(trie, low) == static_cast<uint32_t>(end_token)) return legal;
  legal.end_rank = low - legal.children.first;
  legal.end_token = static_cast<uint32_t>(end_token);
  return legal;
}

}  // namespace flashtrie
