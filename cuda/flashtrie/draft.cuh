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

FT_HD float child_log_prob(float logit, float lse) {
  const float difference = logit - lse;
  return difference < 0.0f ? difference : 0.0f;
}

// Neither NaN nor +inf.
FT_HD bool is_good_logit(float x) { return x < __builtin_inff(); }

}  // namespace flashtrie
