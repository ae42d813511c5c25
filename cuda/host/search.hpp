// Trie-constrained beam search on the CPU: the children ask, not the proposals.
#pragma once
#include <cstdint>
#include <vector>

#include "flashtrie/search.cuh"
#include "trie.hpp"

namespace flashtrie {

// Proposal grids of a batch, row-major [num_queries, num_steps, num_slots].
struct Grids {
  const uint32_t* tokens = nullptr;
  const float* logprobs = nullptr;
  uint64_t num_queries = 0;
  uint64_t num_steps = 0;
  uint64_t num_slots = 0;
};

// Hits of a batch, flat; query q owns hits [hit_offsets[q], hit_offsets[q + 1]).
struct SearchOutput {
  std::vector<int64_t> hit_offsets;
  std::vector<uint32_t> key_ids;
  std::vector<float> scores;
  std::vector<float> normalised_scores;
  std::vector<int64_t> token_offsets;
  std::vector<uint32_t> tokens;
  std::vector<int64_t> query_ns;  // time each query took
};

// Flat index of the first NaN or +inf log-prob in row order, or -1.
int64_t find_bad_logprob(const float* logprobs, uint64_t count, int num_threads);

// Any thread count gives the same bytes. Throws only std::bad_alloc.
SearchOutput search(const Trie& trie, const Grids& grids, const SearchParams& params, int num_threads);

}  // namespace flashtrie
