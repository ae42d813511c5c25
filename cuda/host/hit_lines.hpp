// Hits of searches as lines of text, a line a hit, as `flashtrie search` writes them.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace flashtrie {

// Pieces of text one behind the other, each ended by a newline; empty: there are none.
using Lines = std::string_view;

// Flat arrays as in SearchOutput. Of the lines, `names` has one a query, `texts` and `values` one a hit.
struct HitColumns {
  const int64_t* hit_offsets;
  const uint32_t* key_ids;
  const float* scores;
  const float* normalised_scores;
  const int64_t* token_offsets;
  const uint32_t* tokens;
  uint64_t num_queries;
  uint64_t first_query;  // the number of the first one, where they have no names
  Lines names, texts, values;
};

// query, rank from 1, key (its text, else its tokens), key id, score, normalised score and value, between tabs: in parts, to
// be put one behind the other. Throws std::invalid_argument when lines are too few.
std::vector<std::string> hit_lines(const HitColumns& columns, int num_threads);

// Puts the parts one behind the other; `to` has room for them all.
void join_parts(const std::vector<std::string>& parts, char* to, int num_threads);

}  // namespace flashtrie
