// What the paper's kernels are given (the FlashTrie paper's own design and its ablations, for the benchmark), and how
// the workspace of a query is laid out. Host and device read the same struct.
#pragma once
#include "search.cuh"

namespace flashtrie {

constexpr uint32_t kPaperThreads = 512;
constexpr uint32_t kPaperMaxWidth = 2048;  // beams, and results
constexpr uint32_t kPaperMaxSlots = 4096;
constexpr int kPaperPhases = 4;  // cycles of expansion, validation, pruning, waiting at barriers

// One hit's place in the answer arrays is query * num_results + rank.
struct PaperBatch {
  TrieView trie;
  SearchParams search;
  const uint32_t* tokens;  // [num_queries, num_steps, num_slots]
  const float* logprobs;
  uint8_t* workspace;  // workspace_bytes a group
  uint64_t workspace_bytes;
  uint64_t candidate_capacity;  // of a step: beam_width * num_slots always suffices
  uint64_t result_capacity;     // of a query
  const uint32_t* valid_tokens;   // PPT: sorted tokens of each depth
  const uint8_t* valid_flags;     // PPT: bit 0, some key ends with it there; bit 1, some key goes on
  const uint32_t* valid_offsets;  // PPT: max_depth + 1
  const uint64_t* hash_keys;      // hash-transitions: (node << 32 | token), all ones where empty
  const uint32_t* hash_children;
  uint32_t* barriers;    // one a group, zero before the first launch ever
  uint64_t* phases;      // kPaperPhases, added to by the first group
  uint32_t* num_hits;    // num_queries
  uint32_t* num_tokens;  // num_queries
  uint32_t* key_ids;
  float* scores;
  float* normalised_scores;
  uint32_t* depths;
  uint32_t* hit_tokens;  // num_queries * num_results * num_steps; a query's tokens lie together
  uint32_t num_queries;
  uint32_t num_steps;
  uint32_t num_slots;
  uint32_t num_groups;
  uint32_t blocks_per_group;
  int32_t log2_hash;
};

// Where everything of a group lies in its workspace; `end` is the size.
struct PaperLayout {
  uint64_t candidate_keys, candidate_links, result_keys, result_links, result_scores, result_steps;
  uint64_t run_keys, run_values, nodes, scores, history, row_tokens, row_logprobs, row_flags, row_counts, ends, counts, end;
};

FT_HD uint64_t paper_take(uint64_t& at, uint64_t bytes) {
  const uint64_t begin = at;
  at += (bytes + 255) / 256 * 256;
  return begin;
}

// A run is what a sorted chunk leaves: the best `width` of at least 2 * width candidates.
FT_HD uint64_t paper_chunk(uint64_t width) {
  uint64_t chunk = kPaperThreads;
  while (chunk < 2 * width) chunk *= 2;
  return chunk;
}

FT_HD PaperLayout paper_layout(uint64_t beam_width, uint64_t num_results, uint64_t num_steps, uint64_t num_slots,
                               uint64_t candidate_capacity, uint64_t result_capacity) {
  PaperLayout layout{};
  uint64_t at = 0;
  const uint64_t chunks = candidate_capacity / paper_chunk(beam_width) + 1;
  const uint64_t result_chunks = result_capacity / paper_chunk(num_results) + 1;
  const uint64_t runs = chunks * beam_width, result_runs = result_chunks * num_results;
  layout.candidate_keys = paper_take(at, 8 * candidate_capacity);
  layout.candidate_links = paper_take(at, 4 * candidate_capacity);
  layout.result_keys = paper_take(at, 8 * result_capacity);
  layout.result_links = paper_take(at, 4 * result_capacity);
  layout.result_scores = paper_take(at, 4 * result_capacity);
  layout.result_steps = paper_take(at, result_capacity);
  layout.run_keys = paper_take(at, 8 * (runs > result_runs ? runs : result_runs));
  layout.run_values = paper_take(at, 4 * (runs > result_runs ? runs : result_runs));
  layout.nodes = paper_take(at, 4 * beam_width);
  layout.scores = paper_take(at, 4 * beam_width);
  layout.history = paper_take(at, 4 * beam_width * num_steps);
  layout.row_tokens = paper_take(at, 4 * num_steps * num_slots);
  layout.row_logprobs = paper_take(at, 4 * num_steps * num_slots);
  layout.row_flags = paper_take(at, num_steps * num_slots);
  layout.row_counts = paper_take(at, 4 * num_steps);
  layout.ends = paper_take(at, 8 * num_steps);
  layout.counts = paper_take(at, 4 * 4);
  layout.end = at;
  return layout;
}

FT_HD uint64_t transition_hash(uint64_t key, int log2_size) { return (key * 0x9e3779b97f4a7c15ull) >> (64 - log2_size); }

}  // namespace flashtrie
