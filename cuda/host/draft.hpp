// Draft trees on the CPU: the schedule over batch rows and depths. The rules are in flashtrie/draft.cuh.
#pragma once
#include "flashtrie/draft_rules.cuh"

namespace flashtrie {

struct DraftInputs {
  const void* logits;           // [B, block, V] of the sizes' logit type
  const int32_t* roots;         // [B]
  const int32_t* base_lengths;  // [B]
  const int32_t* vocab_map;     // [V], or null
};

// Build the trees of all batch rows with `num_threads` threads (at least 1).
void build_draft_trees(const DraftSizes& sizes, const DraftInputs& inputs, const DraftOutputs& outputs, int num_threads);

// The same, held to TrieRules or MaskRules.
template <typename Rules>
void build_held_draft_trees(const DraftSizes& sizes, const DraftInputs& inputs, const DraftConstraint<Rules>& constraint,
                            const DraftOutputs& outputs, int num_threads);

}  // namespace flashtrie
