// One line of JSON with a proposal grid, of the form that programs write; anything else is left to
// Python (flashtrie_cli/query/proposal_lines.py), which then also says what is wrong.
#pragma once
#include "parse.hpp"

namespace flashtrie {

struct GridLine {
  Buffer<uint32_t> tokens;  // [num_steps, num_slots]; kUnknownToken in empty slots
  Buffer<float> logprobs;   // alike; -inf in empty slots
  size_t num_steps = 0, num_slots = 0;
  size_t id_begin = 0, id_end = 0;  // the bytes of `id`'s value, a string or an integer; equal: none
};

// {"id": …, "tokens": [[…], …], "logprobs": [[…], …]} in any order, `id` maybe missing, of which the first
// `max_steps` rows count. Tokens must be integers and rows fit together. False for any other line.
bool parse_grid_line(std::string_view line, size_t max_steps, GridLine& out);

}  // namespace flashtrie
