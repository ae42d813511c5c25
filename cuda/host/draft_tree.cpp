#include "draft_tree.hpp"

#include <algorithm>
#include <cstring>

namespace flashtrie {

void DraftTree::offer(uint32_t index) {
  const DraftNode& node = nodes_[index];
  if (node.num_taken >= node.offers.count) return;
  frontier_.push_back(rank_key(node.score + node.offers.candidates[node.num_taken].log_prob, index));
  std::push_heap(frontier_.begin(), frontier_.end());
}

uint32_t DraftTree::pop_best() {
  std::pop_heap(frontier_.begin(), frontier_.end());
  const uint32_t index = key_node(frontier_.back());
  frontier_.pop_back();
  return index;
}

bool DraftTree::is_truncated() const {
  return std::any_of(nodes_.begin(), nodes_.end(), [&](const DraftNode& node) {
    return node.offers.has_more && node.num_taken == sizes_.top_k;
  });
}

void DraftTree::write(const DraftOutputs& out, int64_t batch, int32_t base_length, const int32_t* vocab_map,
                      int32_t status) {
  const int64_t size = sizes_.num_nodes;
  const int64_t num_valid = static_cast<int64_t>(nodes_.size());
  for (int64_t i = 0; i < size; ++i) {
    const DraftNode* node = i < num_valid ? &nodes_[i] : nullptr;
    const int64_t at = batch * size + i;
    int32_t token = node ? node->token : 0;
    if (node && i > 0 && vocab_map) token = vocab_map[token];
    out.node_token_ids[at] = token;
    out.verify_token_ids[at] = token;
    out.node_depths[at] = node ? node->depth : 0;
    out.parent_ids[at] = node ? node->parent : -1;
    out.node_scores[at] = node ? node->score : -__builtin_inff();
    out.verify_position_ids[at] = node ? base_length + node->depth : 0;
    out.select_token_indices[at] = i;
    if (out.node_states) out.node_states[at] = node ? node->state : kNoNode;
  }
  write_masks(out, batch);
  out.valid_counts[batch] = static_cast<int32_t>(num_valid);
  out.context_lengths[batch] = base_length + sizes_.num_nodes;
  out.status[batch] = status | (is_truncated() ? kDraftTruncated : 0);
}

// A node attends to what its parent attends to, and to itself.
void DraftTree::write_masks(const DraftOutputs& out, int64_t batch) {
  const int64_t size = sizes_.num_nodes, words = sizes_.mask_words();
  int32_t* packed = out.packed_ancestor_mask + batch * size * words;
  int8_t* rows = out.ancestor_mask + batch * size * size;
  memset(packed, 0, static_cast<size_t>(size * words) * sizeof(int32_t));
  memset(rows, 0, static_cast<size_t>(size * size));
  for (int64_t i = 0; i < size; ++i) {
    const bool is_valid = i < static_cast<int64_t>(nodes_.size());
    if (!is_valid && !sizes_.self_padding) break;
    if (is_valid && i > 0) {
      const int64_t parent = nodes_[i].parent;
      memcpy(packed + i * words, packed + parent * words, static_cast<size_t>(words) * sizeof(int32_t));
      memcpy(rows + i * size, rows + parent * size, static_cast<size_t>(size));
    }
    packed[i * words + i / 32] |= static_cast<int32_t>(1u << (i % 32));
    rows[i * size + i] = 1;
  }
}

}  // namespace flashtrie
